"""`StepComputation`: the tensors and the computation of an optimizer step, without data, logging and checkpoints.

`Trainer` runs it on a device, and `titanplans.foresight` on fake tensors.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PretrainedConfig

from titanplans.config import DDPConfig, JobConfig, strategy_of
from titanplans.parallel import ddp
from titanplans.parallel.fsdp import gradient_sync
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.training.trainer.loss import CrossEntropyLoss
from titanplans.training.trainer.model import LanguageModel
from titanplans.training.trainer.optimizer import Optimizers
from titanplans.training.trainer.step import Clipping

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Inputs ("input", "positions") and labels, each `[local_batch_size, seq_len]`."""


class StepComputation:
    """The model, the loss and the optimizers of a job on this rank, and what a step computes with them.

    Args:
        job: a checked job.
        config: the config of its model.
        mesh: all ranks.
        device: this rank's device.

    Attributes:
        model_parts: the model, or this rank's pipeline stages. A subclass sets it, `pipeline` and `optimizers`.
        pipeline: runs the stages; None without pipeline parallelism.
        optimizers: the optimizers of all parts.
    """

    model_parts: list[LanguageModel]
    pipeline: Any
    optimizers: Optimizers

    def __init__(self, job: JobConfig, config: PretrainedConfig, mesh: Mesh, device: torch.device):
        self.job, self.strategy = job, strategy_of(job)
        self.hf_config, self.mesh, self.device = config, mesh, device
        self.loss = CrossEntropyLoss(job.loss, self.strategy.compile)
        self.clipping = Clipping(skips_nonfinite=job.training.skip_nan_inf)

    @property
    def lms(self) -> list[Any]:
        """The Hugging Face model, or this rank's pipeline stages of it."""
        return [model.lm for model in self.model_parts]

    def forward_backward_step(self, batch: Batch, global_valid_tokens: torch.Tensor) -> torch.Tensor:
        """Add the gradients of one batch; return its loss on this rank (see `loss_of`), detached."""
        loss = self.loss_of(batch, global_valid_tokens)
        if self.pipeline is None:  # a pipeline's schedule has run the backward already
            loss.backward()
        return loss.detach()

    def loss_of(self, batch: Batch, global_valid_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss summed over a batch's tokens and divided by `global_valid_tokens`.

        In validation `global_valid_tokens` is None, and the loss is only the sum. Under context parallelism the loss
        covers the tokens of this rank, and the losses of the CP ranks add up to the loss of the batch. With a pipeline the
        loss is the same on every stage.
        """
        inputs, labels = batch[0], batch[1].to(self.device)
        tokens, positions = inputs["input"].to(self.device), inputs["positions"].to(self.device)
        if self.pipeline is None:
            return self.loss(
                self.model_parts[0](tokens, positions=positions, labels=labels), labels, global_valid_tokens
            )
        microbatches = len(labels) // self.job.parallelism.pipeline_parallel_microbatch_size
        return self.pipeline.run(
            tokens, labels, positions, microbatches=microbatches, valid_tokens=global_valid_tokens
        )

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of a batch. It defers gradient reductions if the job says so."""
        strategy = self.strategy
        if self.pipeline is not None:  # torch's pipeline stages defer the reductions themselves
            return nullcontext()
        if isinstance(strategy, DDPConfig):
            return ddp.accumulate(self.lms[0], last=last, defer=strategy.defer_grad_sync)
        return gradient_sync.accumulate(
            self.lms[0],
            last=last,
            defer=strategy.fsdp_defer_grad_sync,
            keep_gathered=strategy.fsdp_keep_gathered,
        )

    def clip(self, step: int) -> torch.Tensor:
        """Clip the gradients, or drop them under training.skip_nan_inf; return their norm before clipping."""
        parameters = [parameter for lm in self.lms for parameter in lm.parameters()]
        pipeline_args: dict[str, Any] = {}
        if self.pipeline is not None:
            # The norm needs the sum of the gradients of each parameter that several stages hold (tied weights).
            self.pipeline.sum_shared_gradients()
            pipeline_args = {"pp_group": self.pipeline.group, "counted": self.pipeline.counted(parameters)}
        # max_norm = 0 turns clipping off, but the norm is still measured.
        return self.clipping.clip(parameters, self.job.training.max_norm or math.inf, step, **pipeline_args)
