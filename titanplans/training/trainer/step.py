"""Gradient clipping in torchtitan's `train_step`, skipping steps whose gradient is not finite, and whether a run is finite.

`train_step` has no hook between the last backward and the optimizer. The norm is computed in
`titanplans.split.gradients`.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torchtitan.distributed import utils as dist_utils

from titanplans.split.gradients import clip_gradients, local_of, skip_nonfinite
from titanplans.torch_private.swapped import swapped

Clip = Callable[[list[torch.Tensor], float], torch.Tensor]

_log = logging.getLogger(__name__)


class Skipped:
    """Clips gradients, and skips the steps whose gradient is not finite.

    Attributes:
        steps: the number of steps that this run has skipped.
        in_a_row: steps skipped since the last one that was taken.
    """

    def __init__(self) -> None:
        self.steps = self.in_a_row = 0

    def clip(self, parameters: list[torch.Tensor], max_norm: float, step: int, **stages: Any) -> torch.Tensor:
        """Clip as `clip_gradients` does, `stages` being its arguments for a pipeline.

        Where the norm is not finite on any rank, drop every gradient.
        An optimizer passes over parameters without a gradient: weights and moments stay as they are.
        """
        norm = clip_gradients(parameters, max_norm, **stages)
        if not skip_nonfinite(norm):
            self.in_a_row = 0
        else:
            self.steps += 1
            self.in_a_row += 1
            for parameter in parameters:
                parameter.grad = None
            _log.info(
                f"step {step}: the gradient's norm is {norm.item()}, so the step is skipped ({self.steps} in this run)"
            )
        return norm


class FiniteSoFar:
    """Whether losses, norms and weights of a run are finite: a checkpoint of others would be of no use.

    Args:
        models: whose weights they are.
        device: of the flag, so that adding to it does not synchronise.
    """

    def __init__(self, models: Sequence[nn.Module], device: torch.device):
        self.models, self._flag = models, torch.ones((), dtype=torch.int32, device=device)

    def take(self, numbers: Iterable[torch.Tensor]) -> None:
        """Add the losses and norms of a step that was not skipped."""
        self._flag *= torch.stack([number.float() for number in numbers]).isfinite().all()

    def everywhere(self) -> bool:
        """Whether the weights, and all that was added, are finite on every rank. Collective."""
        every = [parameter.detach() for model in self.models for parameter in model.parameters()]
        weights = [weight for weight in every if weight.is_floating_point()]  # NF4 codes always are
        local = [
            shard for weight in weights if (shard := local_of(weight)).numel()
        ]  # an empty one has no maximum
        self._flag *= torch.nn.utils.get_total_norm(local, torch.inf).isfinite()
        torch.distributed.all_reduce(self._flag, torch.distributed.ReduceOp.MIN)
        return bool(self._flag.item())


def clipping(clip: Clip) -> AbstractContextManager[None]:
    """Let torchtitan's `train_step` clip by `clip(parameters, max_norm)`, which returns the norm before clipping.

    `train_step` calls `torchtitan.distributed.utils.clip_grad_norm_`, which stacks the norms of all gradients. That
    fails for plain tensors among DTensors and for DTensors of several meshes, and it can't skip a step. It is replaced
    only while the body runs.
    """

    def clip_grad_norm_(
        parameters: Iterable[torch.Tensor], max_norm: float, *, pp_mesh: Any, ep_enabled: bool, foreach: bool
    ) -> torch.Tensor:
        assert pp_mesh is None  # `WholeSequences` leaves the norm of all stages to `clip`
        return clip(list(parameters), max_norm)

    return swapped(dist_utils, "clip_grad_norm_", clip_grad_norm_)
