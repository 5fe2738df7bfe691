"""Helpers of a training step: clipping and skipped steps, the check for finite values, a graceful stop, random states."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from titanplans.parallel.mesh.process_group import default_device_type
from titanplans.split.gradients import clip_gradients, local_of, skip_nonfinite
from titanplans.torch_private.distributed import default_store

_LAST_STEP = "titanplans/last_step"

_log = logging.getLogger(__name__)


class Clipping:
    """Clips gradients. With `skips_nonfinite` it drops a gradient that is not finite, so that the step changes nothing.

    Attributes:
        skipped_steps: the number of steps that this run has skipped.
        skipped_in_a_row: the number of steps skipped since the last one that was taken.
    """

    def __init__(self, *, skips_nonfinite: bool):
        self.skips_nonfinite, self.skipped_steps, self.skipped_in_a_row = skips_nonfinite, 0, 0

    def clip(
        self, parameters: list[torch.Tensor], max_norm: float, step: int, **pipeline_args: Any
    ) -> torch.Tensor:
        """Clip with `clip_gradients`, which also gets `pipeline_args`, and return the norm before clipping."""
        norm = clip_gradients(parameters, max_norm, **pipeline_args)
        if not self.skips_nonfinite or not skip_nonfinite(norm):
            self.skipped_in_a_row = 0
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            # Without a gradient, an optimizer changes neither the weight nor its moments.
            for parameter in parameters:
                parameter.grad = None
            _log.info(
                f"step {step}: the gradient's norm is {norm.item()}, so the step is skipped "
                f"({self.skipped_steps} in this run)"
            )
        return norm


class FiniteCheck:
    """Records whether the losses, gradient norms and weights of a run are finite. If not, the run's state is not saved."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device):
        # The flag is on the device, so that updating it does not synchronise.
        self.models, self._flag = models, torch.ones((), dtype=torch.int32, device=device)

    def add(self, values: Iterable[torch.Tensor]) -> None:
        """Add the losses and the gradient norm of a step that was not skipped."""
        self._flag *= torch.stack([value.float() for value in values]).isfinite().all()

    def on_all_ranks(self) -> bool:
        """Return whether the weights and all added values are finite on every rank. Collective."""
        shards = [local_of(weight.detach()) for model in self.models for weight in model.parameters()]
        # NF4 codes are integers, hence finite, and an empty shard has no maximum.
        local = [shard for shard in shards if shard.is_floating_point() and shard.numel()]
        self._flag *= torch.nn.utils.get_total_norm(local, torch.inf).isfinite()
        torch.distributed.all_reduce(self._flag, torch.distributed.ReduceOp.MIN)
        return bool(self._flag.item())


class GracefulStop:
    """Makes all ranks stop after the same step once one of them has received a signal.

    A signal may reach ranks at different times, or only one rank. The first rank that notices it after step N writes N + 2
    to the process group's store as the last step. Every rank sees this entry before it ends step N + 2, since the
    collectives of a step make each rank wait for all others.

    Args:
        is_requested: whether this rank has received the signal.
    """

    def __init__(self, is_requested: Callable[[], bool]):
        self.is_requested, self.store = is_requested, default_store()
        self._previous_step: torch.Event | None = None

    def is_last(self, step: int) -> bool:
        """Return whether all ranks end after `step`, which this rank has just taken."""
        if (device_type := default_device_type()) != "cpu":
            # The host runs ahead of an accelerator. Wait until the accelerator has finished the previous step, so that its
            # collectives have made the ranks wait for each other.
            if self._previous_step is not None:
                self._previous_step.synchronize()
            self._previous_step = torch.Event(device_type)
            self._previous_step.record()
        if self.is_requested():
            self.store.compare_set(_LAST_STEP, "", str(step + 2))  # sets it only if no rank has
        return self.store.check([_LAST_STEP]) and int(self.store.get(_LAST_STEP)) <= step


def get_rng_state() -> dict[str, torch.Tensor]:
    """Return the states of torch's generators on this rank, by device type: the CPU, and the accelerator if there is one."""
    state = {"cpu": torch.get_rng_state()}
    if (device_type := default_device_type()) != "cpu":
        state[device_type] = torch.get_device_module(device_type).get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Set torch's generators to the states that `get_rng_state` has returned."""
    torch.set_rng_state(state["cpu"])
    if (device_type := default_device_type()) != "cpu":
        torch.get_device_module(device_type).set_rng_state(state[device_type])
