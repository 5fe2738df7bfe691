"""Gradient clipping in torchtitan's `train_step`, and skipping steps whose gradient is not finite.

`train_step` has no hook between the last backward and the optimizer. The norm is computed in
`titanplans.split.gradients`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.distributed import utils as dist_utils

from titanplans.split.gradients import clip_gradients, skip_nonfinite

Clip = Callable[[list[torch.Tensor], float], torch.Tensor]

_log = logging.getLogger(__name__)


class Skipped:
    """Clips gradients, and skips the steps whose gradient is not finite.

    Attributes:
        steps: the number of steps that this run has skipped.
        in_a_row: of these the ones since the last that was taken.
    """

    def __init__(self) -> None:
        self.steps = self.in_a_row = 0

    def clip(self, parameters: list[torch.Tensor], max_norm: float, step: int) -> torch.Tensor:
        """Clip as `clip_gradients` does; where the norm is not finite on any rank, drop every gradient.

        An optimizer passes over parameters without a gradient: weights and moments stay as they are.
        """
        norm = clip_gradients(parameters, max_norm)
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


@contextmanager
def clipping(clip: Clip) -> Iterator[None]:
    """Let torchtitan's `train_step` clip by `clip(parameters, max_norm)`, which returns the norm before clipping.

    `train_step` calls `torchtitan.distributed.utils.clip_grad_norm_`, which stacks the norms of all gradients. That
    fails for plain tensors among DTensors and for DTensors of several meshes, and it can't skip a step. It is replaced
    only while the body runs.
    """

    def clip_grad_norm_(
        parameters: Iterable[torch.Tensor], max_norm: float, *, pp_mesh: Any, ep_enabled: bool, foreach: bool
    ) -> torch.Tensor:
        if pp_mesh is not None:
            raise NotImplementedError("gradients of pipeline stages can't be clipped here")
        return clip(list(parameters), max_norm)

    before = dist_utils.clip_grad_norm_
    dist_utils.clip_grad_norm_ = clip_grad_norm_  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        dist_utils.clip_grad_norm_ = before
