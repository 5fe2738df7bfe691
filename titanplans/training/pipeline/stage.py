"""How a job's model is cut into stages, known before a process starts; and a stage as torch's schedules call it."""

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
from titanplans.parallel.pipeline.balance import balance, starts_of_names
from titanplans.split.decoder import find_decoder
from titanplans.split.stages.compare import check_stages
from titanplans.split.stages.schedules import Action, Kind, stage_count
from titanplans.split.stages.stages import Stages
from titanplans.split.stages.trace import Trace, trace
from titanplans.text import class_name
from titanplans.torch_private.pipelining import backward_of_weights, without_views
from titanplans.user_code import as_user_error


def untimed(action: Action) -> AbstractContextManager[None]:
    """Return a context that measures nothing."""
    return nullcontext()


class ScheduledStage(PipelineStage):
    """The stage `part`, a `LanguageModel`. Every stage is given the tokens of a micro batch, by keyword.

    The last one gives the loss, and not logits, which torch would keep: it is of one number, where logits are sharded.

    Attributes:
        loss: the job's `CrossEntropyLoss`.
        valid_tokens: of the whole batch; None, in validation, for a sum over tokens.
        timing: the context in which each computation of a micro batch runs.
    """

    valid_tokens: torch.Tensor | None = None
    timing: Callable[[Action], AbstractContextManager[None]] = staticmethod(untimed)

    def __init__(
        self,
        part: Any,
        number: int,
        stages: int,
        device: torch.device,
        group: torch.distributed.ProcessGroup,
        loss: Any,
    ):
        # FSDP2's state is the model's.
        super().__init__(part.lm, number, stages, device, group=group)
        self.part, self.loss = part, loss
        self._buffers_before: dict[str, torch.Tensor] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """torch's, timed."""
        with self.timing(Action(self.stage_index, "forward", fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """torch's, timed; without `full_backward` it computes the gradients of inputs alone."""
        kind: Kind = "backward_input" if kwargs.get("full_backward") is False else "backward"
        with self.timing(Action(self.stage_index, kind, bwd_chunk_id)):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """torch's, timed."""
        with self.timing(Action(self.stage_index, "backward_weight", bwd_chunk_id)):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(
        self, *received: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor, **inputs: Any
    ) -> Any:
        """Run a micro batch; `received` is what the stage before gave."""
        for x in received:
            if (
                x.requires_grad
            ):  # its gradient is sent as it is, and a collective takes contiguous tensors alone
                x.register_hook(torch.Tensor.contiguous)
        output = self.part(tokens, labels=labels, received=received, **inputs)
        if self.is_last:
            return self.loss(output, labels, self.valid_tokens)
        return without_views(output)

    def _compute_outputs(
        self, *received: Any, module: Any, **inputs: Any
    ) -> Any:  # private: torch PipelineStage, which infers the shapes of what is sent by a forward
        self._buffers_before = {name: buffer.clone() for name, buffer in self.submod.named_buffers()}
        return self.forward_maybe_with_nosync(*received, **inputs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False
    ) -> Any:
        """torch's, which frees what several weights share with the first of them."""
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        backward_of_weights(self.submod.parameters(), bwd_kwargs["param_groups"])
        return (), None

    def _post_metadata_inference_cleanup(self) -> None:  # private: torch PipelineStage
        super()._post_metadata_inference_cleanup()
        self.part.after_shape_inference()
        # Its forward was none of the training's: buffers that a forward moves are as before.
        buffers = dict(self.submod.named_buffers())
        with torch.no_grad():
            for name, before in self._buffers_before.items():
                buffers[name].copy_(before)
        self._buffers_before = {}


def stages_of(model: Any, options: PipelineParallel, ranks: int, seq_len: int) -> Stages:
    """Return the stages of `model`, an unsplit one on meta.

    Raises:
        ParallelError: so many stages are not possible, or can't be told from a forward on meta.
    """
    decoder = find_decoder(model)
    if options.pipeline_parallel_split_points:
        starts = starts_of_names(decoder.names, options.pipeline_parallel_split_points)
    else:
        schedule, layers = options.pipeline_parallel_schedule, options.pipeline_parallel_layers_per_stage
        stages = stage_count(schedule, ranks, len(decoder.names), layers)
        costs = flops_of_blocks(model, decoder, seq_len)
        starts = balance(costs.blocks, costs.first, costs.last, stages)
    return Stages(model, trace_on_meta(model, seq_len), starts)


def trace_on_meta(model: Any, seq_len: int) -> Trace:
    """Return what the blocks of `model`, on meta, hand to each other.

    Raises:
        ParallelError: stages can't do what its forward does, or it reads values, and there are none on meta.
    """
    with _on_meta(model, seq_len) as (copied, inputs):
        return trace(copied, find_decoder(copied), inputs)


def check_stages_on_meta(model: Any, stages: Stages, seq_len: int) -> None:
    """Refuse stages of `model`, on meta, that do not compute what it computes of sequences of `seq_len` tokens.

    Raises:
        ParallelError: names the first block that differs.
    """
    with _on_meta(model, seq_len, sequences=2) as (
        copied,
        inputs,
    ):  # the trace had one: no number in it is their count
        check_stages(copied, stages, inputs)


@contextmanager
def _on_meta(model: Any, seq_len: int, sequences: int = 1) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """Yield a copy of `model`, and the inputs of a forward on meta; what that raises is an error of its stages."""
    ids, model = torch.zeros(sequences, seq_len, dtype=torch.int64, device="meta"), copy.deepcopy(model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others multiply no float32
    cannot = f"{class_name(model)} can't be split into stages"
    remedy = "without stages (pipeline_parallel_degree = 1) it trains as it is"
    ends = "a forward on meta, where a number that is read from a tensor is 0 or 1, ends with"
    try:
        with for_meta(), as_user_error(ends, ParallelError):
            yield model, {"input_ids": ids}
    except ParallelError as error:
        raise ParallelError(f"{cannot}: {error}; {remedy}") from error
