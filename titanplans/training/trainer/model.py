"""The language model of a job: `make_models` builds and parallelises it, and the trainer calls it as a `LanguageModel`.

The Hugging Face model inside it, `LanguageModel.lm`, is built by `titanplans.modeling` and parallelised by
`titanplans.parallel`.
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
from titanplans.training.pipeline.stage import ScheduledStage
from titanplans.training.trainer import documents
from titanplans.training.trainer.loss import CrossEntropyLoss


class LanguageModel:
    """Holds a causal language model, or a pipeline stage of one; maps token ids to logits or to the loss.

    Args:
        config: the architecture, from `modeling.load_config` or `modeling.load_config_file`.
        document_keyword: the forward's keyword that keeps the documents of a sequence apart, "cu_seqlens" or "position_ids".
            None: attention and recurrent states run across the borders of documents.
    """

    lm: PreTrainedModel
    """The Hugging Face model."""
    balance_loss: torch.Tensor | None = None
    """The weighted router balance loss of the newest forward; None: the model has none."""
    loss: CrossEntropyLoss
    """The job's loss, set by `set_loss` on ranks whose stage computes logits."""
    fused: FusedLoss | None = None
    """Computes the loss in the head, chunk by chunk; None: the forward returns logits."""
    data_group: Group | None = None
    """The group of data-parallel ranks; None: there is only one such rank."""
    after_shape_inference: Callable[[], None] = staticmethod(lambda: None)
    """Called after a pipeline stage's shape-inference forward, which does not train."""

    def __init__(self, config: PretrainedConfig, *, document_keyword: str | None = None):
        self.lm = modeling.build(config)
        self.document_keyword, self._without_cache = document_keyword, without_cache(self.lm)

    def set_loss(
        self, loss: CrossEntropyLoss, batch: DeviceMesh | None, *, splits_backward: bool = False
    ) -> None:
        """Set the loss, fused with the model's head if possible, and have it include the router balance loss.

        Args:
            loss: the job's loss.
            batch: the mesh of data-parallel ranks, whose batches the balance loss covers; None: only this rank's.
            splits_backward: whether the pipeline schedule computes gradients of inputs and of weights in two passes.

        Raises:
            NotFused: the job requires a fused loss, but this head can't compute it.
        """
        stage = record_of(self.lm).stage
        if stage is not None and stage.gives:
            return  # this is not the last stage, so it computes no logits
        self.loss, self.fused = loss, loss.fuse(self.lm, splits_backward=splits_backward)
        self.data_group = None if batch is None else group_of(batch)
        loss.get_balance_loss = lambda: self.balance_loss

    def __call__(
        self,
        tokens_BL: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        received: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Return the logits `[B, L, V]` of token ids `[B, L]`; under loss parallelism a DTensor, `Shard(2)` on "tp".

        Args:
            tokens_BL: token ids.
            positions: `[B, L]`, counted from the beginning of each document of a sequence. They are used only with a
                `document_keyword`; otherwise a token's position is its index in the sequence. With "cu_seqlens" the logits
                are `[1, B * L, V]`, in the same order.
            labels: `[B, L]`. With labels and a fused loss, return `DeferredLogits`, which only the loss can read.
            received: the tensors that a pipeline stage gets from the previous stage. Instead of logits, every stage but the
                last returns the tensors that the next stage receives.
        """
        inputs: dict[str, Any] = {"input_ids": tokens_BL}
        if self.document_keyword is not None:
            assert positions is not None
            inputs = documents.inputs(tokens_BL, positions, self.document_keyword)
        inputs |= self._without_cache
        stage = record_of(self.lm).stage
        forward = partial(self._forward, inputs, labels)
        output = forward() if stage is None else stage.run(received, forward)
        if stage is not None and stage.gives:
            return output
        self.balance_loss = added_loss(self.lm, output, self.data_group if self.lm.training else None)
        if self.balance_loss is None and getattr(self.lm.config, "output_router_logits", False):
            raise ModelError(
                f"output_router_logits = True, but {type(self.lm).__name__} computes no router balance loss; "
                "remove output_router_logits"
            )
        return logits_of(output)

    def _forward(self, inputs: dict[str, Any], labels: torch.Tensor | None) -> Any:
        if self.fused is not None and labels is not None:
            output = self._forward_with_fused_loss(inputs, labels)
            if output is not None:
                return output
        return self.lm(**inputs)

    def _forward_with_fused_loss(self, inputs: dict[str, Any], labels: torch.Tensor) -> Any:
        """Return the output of a forward whose head computes the loss; if the head can't, unset `fused` and return
        None."""
        assert self.fused is not None
        objective = self.loss.objective if self.lm.training else Objective()
        try:
            with self.fused(labels, **objective._asdict()):
                output = self.lm(**inputs)
            if not isinstance(logits := logits_of(output), DeferredLogits):
                raise NotFused(f"{type(self.lm).__name__} returns logits that are not its head's output")
            logits.check()
        except NotFused as error:
            self.loss.on_fusion_failed(error)
            self.fused = None
            return None
        return output

    @torch.no_grad()
    def initialize(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise every parameter and buffer. Called after `to_empty`.

        Args:
            buffer_device: the device of the buffers, if it differs from the parameters' (CPU offload).
        """
        # The weights depend on torch's seed, which all ranks share, and not on the generator's state. So the weights
        # depend neither on the degrees nor on random numbers that were drawn before.
        modeling.initialize(self.lm, seed=torch.initial_seed())
        if buffer_device is not None:
            modeling.move_buffers(self.lm, buffer_device)


class ModelParts(NamedTuple):
    """The models that this rank trains, parallelised, on meta."""

    model_parts: list[LanguageModel]
    pipeline: Pipeline | None


class Models(NamedTuple):
    """The models that this rank trains."""

    model_parts: list[LanguageModel]
    """The model, or this rank's pipeline stages: parallelised, initialised, in training mode."""
    pipeline: Pipeline | None
    """Runs the stages; None without pipeline parallelism."""
    flops: int
    """Floating-point operations per token of one forward and backward of the unsplit model."""


def make_models(
    job: JobConfig,
    strategy: FSDP2Config | DDPConfig,
    config: PretrainedConfig,
    mesh: Mesh,
    device: torch.device,
    loss: CrossEntropyLoss,
) -> Models:
    """Build the model of a job on meta, parallelise it and initialise it.

    With `checkpoint.create_seed_checkpoint` the model stays unsplit and is initialised on the CPU.
    """
    name, flavor = resolve.model_name(job)
    if (weights_folder := resolve.hf_weights_folder(job)) is not None:
        logger.info(
            f"model from {name if flavor == 'config' else f'{name} {flavor}'}, tokenizer from "
            f"{resolve.tokenizer_path(job)}; a run that resumes no checkpoint loads its weights from {weights_folder}"
        )
    model = build_on_meta(job, config, documents.document_keyword(job, config))
    count, flops = _count_parameters_and_flops(model.lm, strategy, job.training.seq_len)
    logger.info(f"Model {name} {flavor} size: {count:,} total parameters")

    model_parts, pipeline, seed_only = [model], None, job.checkpoint.create_seed_checkpoint
    if not seed_only:
        model_parts, pipeline = parallelize_model(model, job, strategy, mesh, device, loss)

    on_cpu = seed_only or job.training.enable_cpu_offload
    for model_part in model_parts:
        model_part.lm.to_empty(device="cpu" if on_cpu else device.type)
        model_part.initialize(buffer_device=device if on_cpu and not seed_only else None)
        if isinstance(strategy, DDPConfig) and not seed_only:
            # DDP comes after initialisation, since it broadcasts rank 0's values when it is set up.
            with rename_option_errors():
                apply_data_parallelism(model_part.lm, mesh, strategy)
        model_part.lm.train()
        splits_backward = pipeline is not None and pipeline.splits_backward
        model_part.set_loss(loss, mesh.get_optional_mesh("batch"), splits_backward=splits_backward)
    return Models(model_parts, pipeline, flops)


def build_on_meta(job: JobConfig, config: PretrainedConfig, document_keyword: str | None) -> LanguageModel:
    """Build a job's model, unsplit, on meta, with weights of training.dtype; the arguments are those of `LanguageModel`."""
    with torch.device("meta"), set_default_dtype(getattr(torch, job.training.dtype)):
        return LanguageModel(config, document_keyword=document_keyword)


def parallelize_model(
    model: LanguageModel,
    job: JobConfig,
    strategy: FSDP2Config | DDPConfig,
    mesh: Mesh,
    device: torch.device,
    loss: CrossEntropyLoss,
    stage_class: type[ScheduledStage] = ScheduledStage,
) -> ModelParts:
    """Parallelise `model`, on meta, in place; or split it into this rank's pipeline stages, and parallelise those.

    The arguments are those of `make_models`; `stage_class` is the class of the torch stages.
    """
    with rename_option_errors():
        if mesh.pp_enabled:
            assert isinstance(strategy, FSDP2Config)  # DDP with a pipeline has been refused
            pipeline = build_pipeline(
                model,
                job.parallelism,
                strategy,
                parallel_dims=mesh,
                seq_len=job.training.seq_len,
                device=device,
                loss=loss,
                dump_folder=job.job.dump_folder,
                stage_class=stage_class,
            )
            return ModelParts(pipeline.model_parts, pipeline)
        parallelize(model.lm, parallel_dims=mesh, config=strategy, dump_folder=job.job.dump_folder)
        if (check := record_of(model.lm).image_check) is not None:
            # The check for images in the input costs a synchronisation, and the batches of a job are text.
            check.remove()
        return ModelParts([model], None)


def _count_parameters_and_flops(
    lm: PreTrainedModel, strategy: FSDP2Config | DDPConfig, seq_len: int
) -> tuple[int, int]:
    """Return the number of parameters of `lm` (on meta), and the FLOPs per token of one forward and backward.

    Adapters and frozen parameters are accounted for.
    """
    if strategy.lora.rank is not None or strategy.freeze:
        lm = copy.deepcopy(lm)  # `prepare` changes it
    with rename_option_errors():
        prepare(lm, lora=strategy.lora.replace(quantize_base=None), freezes=strategy.freeze)
    return modeling.count_flops(lm, seq_len)
