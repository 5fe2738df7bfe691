"""A causal language model as a job calls it: tokens in, logits or their loss out; and how it is made, `make_models`.

The model itself is `LanguageModel.lm`, which is built in `titanplans.modeling` and parallelised in `titanplans.parallel`.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import set_default_dtype
from transformers import PretrainedConfig, PreTrainedModel

from titanplans import modeling
from titanplans.apply.prepare import prepare
from titanplans.config import DDPConfig, FSDP2Config, JobConfig, rename_option_errors
from titanplans.errors import ModelError
from titanplans.loss import DeferredLogits, FusedLoss, NotFused, Objective, added_loss
from titanplans.parallel import parallelize
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.parallel.parallelize import apply_data_parallelism
from titanplans.parallel.record import record_of
from titanplans.split.collectives import Group, group_of
from titanplans.split.stages.trace import logits_of, without_cache
from titanplans.training.job import resolve
from titanplans.training.pipeline.pipeline import Pipeline, build_pipeline
from titanplans.training.trainer import documents
from titanplans.training.trainer.loss import CrossEntropyLoss


class LanguageModel:
    """A causal language model, or a stage of one, and how a job calls it.

    Args:
        config: the architecture. `modeling.load_config` and `modeling.load_config_file` make one.
        documents: the keyword by which the model keeps the documents of a sequence apart; None: it runs across their
        borders.
    """

    lm: PreTrainedModel
    """The model."""
    added: torch.Tensor | None = None
    """The router balance loss of the newest forward."""
    loss: CrossEntropyLoss
    """The job's, with the terms that are added in training to the cross entropy of a token."""
    fused: FusedLoss | None = None
    """What computes the loss in the head, chunk by chunk; None: the forward gives logits."""
    data: Group | None = None
    """The ranks of data parallelism; None: there is one."""
    inferred: Callable[[], None] = staticmethod(lambda: None)
    """Called after a forward in which a pipeline's stage has learnt the shapes that it receives, and nothing else."""

    def __init__(self, config: PretrainedConfig, *, documents: str | None = None):
        self.lm = modeling.build(config)
        self.documents, self._without_cache = documents, without_cache(self.lm)

    def take_loss(
        self, loss: CrossEntropyLoss, batch: DeviceMesh | None, *, splits_backward: bool = False
    ) -> None:
        """Compute `loss` in the head where that can be, and add the router balance loss of the ranks of `batch`.

        `splits_backward`: a schedule computes gradients of weights after those of inputs, and runs a loss's backward twice.

        Raises:
            NotFused: the job asks for a loss in the head, and it can't be computed there.
        """
        stage = record_of(self.lm).stage
        if stage is not None and stage.gives:
            return  # it makes no logits
        self.loss, self.fused = loss, loss.fuse(self.lm, splits_backward=splits_backward)
        self.data = None if batch is None else group_of(batch)
        loss.added = lambda: self.added

    def __call__(
        self,
        tokens_BL: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        received: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Logits `[B, L, V]` of token ids `[B, L]`; under loss parallel a DTensor, `Shard(2)` on "tp".

        `positions`, which count from the beginning of each document packed into a sequence, are dropped unless the model is
        to keep the documents apart: else attention and recurrent states run across their borders, and a token's position
        is its place in the sequence. By `cu_seqlens` the logits are `[1, B * L, V]`, in the same order.

        Where the loss is fused and the labels are known, what stands in for the logits, which nothing but the loss reads.

        A stage of a pipeline takes what it has `received`, too; before the last one it returns what the next one takes.
        """
        inputs: dict[str, Any] = {"input_ids": tokens_BL}
        if self.documents is not None:
            assert positions is not None
            inputs = documents.inputs(tokens_BL, positions, self.documents)
        inputs |= self._without_cache
        stage = record_of(self.lm).stage
        forward = partial(self._output, inputs, labels)
        output = forward() if stage is None else stage.run(received, forward)
        if stage is not None and stage.gives:
            return output
        self.added = added_loss(self.lm, output, self.data if self.lm.training else None)
        if self.added is None and getattr(self.lm.config, "output_router_logits", False):
            raise ModelError(
                f"output_router_logits = True, but {type(self.lm).__name__} computes no router balance loss; "
                "remove output_router_logits"
            )
        return logits_of(output)

    def _output(self, inputs: dict[str, Any], labels: torch.Tensor | None) -> Any:
        output = None if self.fused is None or labels is None else self._fused(inputs, labels)
        return self.lm(**inputs) if output is None else output

    def _fused(self, inputs: dict[str, Any], labels: torch.Tensor) -> Any:
        """Return the output of a forward whose head computes the loss; None if the model won't have it, now and later."""
        assert self.fused is not None
        objective = self.loss.objective if self.lm.training else Objective()
        try:
            with self.fused(labels, **objective._asdict()):
                output = self.lm(**inputs)
            if not isinstance(logits := logits_of(output), DeferredLogits):
                raise NotFused(f"{type(self.lm).__name__} returns other logits than its head")
            logits.check()
        except NotFused as error:
            self.loss.on_fusion_failed(error)
            self.fused = None
            return None
        return output

    @torch.no_grad()
    def initialize(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise every parameter and buffer, after `to_empty`.

        The weights depend on torch's seed alone, which is the same on all ranks: not on the degrees, nor on how often the
        generator was used since.

        Args:
            buffer_device: the device of the buffers if not that of the parameters (CPU offload).
        """
        modeling.initialize(self.lm, seed=torch.initial_seed())
        if buffer_device is not None:
            for module in self.lm.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(buffer_device)


class Models(NamedTuple):
    """What this rank trains."""

    parts: list[LanguageModel]
    """The model, or this rank's stages of it, parallelised, with initial weights, in training mode."""
    pipeline: Pipeline | None
    """What runs the stages; None: there are none."""
    flops: int
    """Floating-point operations per token of one forward and backward of the whole model."""


def make_models(
    job: JobConfig,
    strategy: FSDP2Config | DDPConfig,
    config: PretrainedConfig,
    mesh: Mesh,
    device: torch.device,
    loss: CrossEntropyLoss,
) -> Models:
    """Make the model of a job: build it on meta, parallelise it, initialise it.

    With `checkpoint.create_seed_checkpoint` it is initialised on the CPU, as it is.
    """
    name, flavor = resolve.model_name(job)
    if (published := resolve.published_folder(job)) is not None:
        logger.info(
            f"model from {name if flavor == 'config' else f'{name} {flavor}'}, tokenizer from "
            f"{resolve.tokenizer_path(job)}; a run that resumes nothing takes its weights from {published}"
        )
    with torch.device("meta"), set_default_dtype(getattr(torch, job.training.dtype)):
        model = LanguageModel(config, documents=documents.keyword(job, config))
    count, flops = _parameters_and_flops(model.lm, strategy, job.training.seq_len)
    logger.info(f"Model {name} {flavor} size: {count:,} total parameters")

    pipeline, parts, seed_only = None, [model], job.checkpoint.create_seed_checkpoint
    with rename_option_errors():
        if mesh.pp_enabled:
            assert isinstance(strategy, FSDP2Config)  # DDP has been refused
            pipeline = build_pipeline(
                model,
                job.parallelism,
                strategy,
                parallel_dims=mesh,
                seq_len=job.training.seq_len,
                device=device,
                loss=loss,
                dump_folder=job.job.dump_folder,
            )
            parts = pipeline.parts
        elif not seed_only:
            parallelize(model.lm, parallel_dims=mesh, config=strategy, dump_folder=job.job.dump_folder)
            if (check := record_of(model.lm).image_check) is not None:
                check.remove()  # a job's batches are text

    on_cpu = seed_only or job.training.enable_cpu_offload
    for part in parts:
        part.lm.to_empty(device="cpu" if on_cpu else device.type)
        part.initialize(buffer_device=device if on_cpu and not seed_only else None)
        if isinstance(strategy, DDPConfig) and not seed_only:
            with rename_option_errors():  # now: DDP sends rank 0's values
                apply_data_parallelism(part.lm, mesh, strategy)
        part.lm.train()
        splits_backward = pipeline is not None and pipeline.splits_backward
        part.take_loss(loss, mesh.get_optional_mesh("batch"), splits_backward=splits_backward)
    return Models(parts, pipeline, flops)


def _parameters_and_flops(
    lm: PreTrainedModel, strategy: FSDP2Config | DDPConfig, seq_len: int
) -> tuple[int, int]:
    """Return the parameters of `lm`, on meta, and the floating-point operations per token of a forward and a backward."""
    if strategy.lora.rank is not None or strategy.freeze:
        lm = copy.deepcopy(lm)
    with rename_option_errors():
        prepare(lm, lora=strategy.lora.replace(quantize_base=None), freezes=strategy.freeze)
    return modeling.count_flops(lm, seq_len)
