"""`stages_of` splits a job's model into pipeline stages, without a process group; `ScheduledStage` is a torch stage."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from titanplans.config.sections.parallelism import PipelineParallel
from titanplans.errors import ParallelError
from titanplans.kernels import for_meta
from titanplans.modeling import flops_of_blocks
from titanplans.parallel.pipeline.balance import balance, stage_starts
from titanplans.split.decoder import find_decoder
from titanplans.split.stages.compare import check_stages
from titanplans.split.stages.schedules import Action, Kind, stage_count
from titanplans.split.stages.stages import Stages
from titanplans.split.stages.trace import Trace, trace
from titanplans.text import class_name
from titanplans.torch_private.pipelining import backward_of_weights, copy_views
from titanplans.user_code import as_user_error


def untimed(action: Action) -> AbstractContextManager[None]:
    """Return a context that does nothing. It is `ScheduledStage.timing` while nothing is measured."""
    return nullcontext()


class ScheduledStage(PipelineStage):
    """A torch stage, for torch's schedules, that runs a `LanguageModel`. Every stage gets the tokens of a micro batch.

    The last stage returns the loss instead of the logits, since torch would keep the logits of all micro batches, and they
    may be sharded DTensors.

    Args:
        language_model: the stage's `LanguageModel`.
        index: the index of the stage.
        stages: the number of stages of the model.
        device: this rank's device.
        group: the process group of the pipeline ranks.
        loss: the job's `CrossEntropyLoss`.

    Attributes:
        valid_tokens: in training, the number of labels in the step that count, by which the loss is divided. None
            (validation): the loss is the sum over tokens.
        timing: returns the context in which a computation of a micro batch runs.
    """

    valid_tokens: torch.Tensor | None = None
    timing: Callable[[Action], AbstractContextManager[None]] = staticmethod(untimed)

    def __init__(
        self,
        language_model: Any,
        index: int,
        stages: int,
        device: torch.device,
        group: torch.distributed.ProcessGroup,
        loss: Any,
    ):
        # torch looks for FSDP2's state on the module of a stage, so this is the Hugging Face model, not the `LanguageModel`.
        super().__init__(language_model.lm, index, stages, device, group=group)
        self.language_model, self.loss = language_model, loss
        self._buffers_before: dict[str, torch.Tensor] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run torch's forward of a micro batch, timed."""
        with self.timing(Action(self.stage_index, "forward", fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run torch's backward of a micro batch, timed; with `full_backward = False`, only for the gradients of inputs."""
        kind: Kind = "backward_input" if kwargs.get("full_backward") is False else "backward"
        with self.timing(Action(self.stage_index, kind, bwd_chunk_id)):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the second pass of torch's split backward, which computes the gradients of weights, timed."""
        with self.timing(Action(self.stage_index, "backward_weight", bwd_chunk_id)):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(
        self, *received: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor, **inputs: Any
    ) -> Any:
        """Run the forward of a micro batch; `received` are the tensors from the previous stage."""
        for x in received:
            if x.requires_grad:
                # torch sends the gradient of x to the previous stage, and can send only contiguous tensors.
                x.register_hook(torch.Tensor.contiguous)
        output = self.language_model(tokens, labels=labels, received=received, **inputs)
        if self.is_last:
            return self.loss(output, labels, self.valid_tokens)
        return copy_views(output)

    # private: torch's PipelineStage calls this method once, to infer the shapes of the tensors that are sent.
    def _compute_outputs(self, *received: Any, module: Any, **inputs: Any) -> Any:
        self._buffers_before = {name: buffer.clone() for name, buffer in self.submod.named_buffers()}
        return self.forward_maybe_with_nosync(*received, **inputs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False
    ) -> Any:
        """Run torch's backward. For gradients of weights, keep the graph until all of them are computed."""
        # torch traverses the graph once for each group of weights. Its own code frees buffers that several groups need after
        # the first group.
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        backward_of_weights(self.submod.parameters(), bwd_kwargs["param_groups"])
        return (), None

    def _post_metadata_inference_cleanup(self) -> None:  # private: torch PipelineStage
        super()._post_metadata_inference_cleanup()
        self.language_model.after_shape_inference()
        # The forward for shape inference belongs to no step: restore the buffers that it has changed.
        buffers = dict(self.submod.named_buffers())
        with torch.no_grad():
            for name, before in self._buffers_before.items():
                buffers[name].copy_(before)
        self._buffers_before = {}


def stages_of(model: Any, options: PipelineParallel, ranks: int, seq_len: int) -> Stages:
    """Split `model`, which is unsplit and on meta, into the stages that a job's options ask for.

    Args:
        model: a Hugging Face model.
        options: the options in [parallelism].
        ranks: the pipeline-parallel degree.
        seq_len: tokens per sequence.

    Raises:
        ParallelError: the model can't be split into that many stages, or can't be traced on meta.
    """
    starts = starts_of_stages(model, options, ranks, seq_len)
    return Stages(model, trace_on_meta(model, seq_len), starts)


def starts_of_stages(model: Any, options: PipelineParallel, ranks: int, seq_len: int) -> tuple[int, ...]:
    """Return the index of the first block of each stage. Arguments and errors as `stages_of`, but nothing is traced."""
    decoder = find_decoder(model)
    if options.pipeline_parallel_split_points:
        return stage_starts(decoder.names, options.pipeline_parallel_split_points)
    schedule, layers = options.pipeline_parallel_schedule, options.pipeline_parallel_layers_per_stage
    stages = stage_count(schedule, ranks, len(decoder.names), layers)
    costs = flops_of_blocks(model, decoder, seq_len)
    return balance(costs.blocks, costs.first, costs.last, stages)


def trace_on_meta(model: Any, seq_len: int) -> Trace:
    """Return which tensors the blocks of `model`, on meta, pass to each other.

    Raises:
        ParallelError: the forward does something that stages can't do, or reads values of tensors, which meta lacks.
    """
    with _on_meta(model, seq_len) as (copied, inputs):
        return trace(copied, find_decoder(copied), inputs)


def check_stages_on_meta(model: Any, stages: Stages, seq_len: int) -> None:
    """Refuse stages that compute something else than `model` (on meta) for sequences of `seq_len` tokens.

    Raises:
        ParallelError: names the first block that differs.
    """
    # The trace was made with one sequence, and this check uses two. So it finds a trace in which the number of sequences
    # became a constant.
    with _on_meta(model, seq_len, sequences=2) as (copied, inputs):
        check_stages(copied, stages, inputs)


@contextmanager
def _on_meta(model: Any, seq_len: int, sequences: int = 1) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """Yield a copy of `model` on meta and the inputs of a forward; errors in the body become ParallelErrors."""
    ids, model = torch.zeros(sequences, seq_len, dtype=torch.int64, device="meta"), copy.deepcopy(model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other implementations do not support float32
    problem = f"{class_name(model)} can't be split into stages"
    remedy = "without stages (pipeline_parallel_degree = 1) it trains as it is"
    context = "a forward on meta, where a number that is read from a tensor is 0 or 1, ends with"
    try:
        with for_meta(), as_user_error(context, ParallelError):
            yield model, {"input_ids": ids}
    except ParallelError as error:
        raise ParallelError(f"{problem}: {error}; {remedy}") from error
