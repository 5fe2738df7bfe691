"""Parts of a training step: clipping and skipped steps, whether all is finite, random states, the last step by a signal."""

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
    """Clips gradients, and, if it `skips`, drops those of steps whose gradient is not finite.

    Attributes:
        steps: the number of steps that this run has skipped.
        in_a_row: steps skipped since the last one that was taken.
    """

    def __init__(self, *, skips: bool):
        self.skips, self.steps, self.in_a_row = skips, 0, 0

    def clip(self, parameters: list[torch.Tensor], max_norm: float, step: int, **stages: Any) -> torch.Tensor:
        """Clip as `clip_gradients` does, `stages` being its arguments for a pipeline.

        An optimizer passes over parameters without a gradient: weights and moments stay as they are.
        """
        norm = clip_gradients(parameters, max_norm, **stages)
        if not self.skips or not skip_nonfinite(norm):
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

    The flag is on the device, so that adding to it does not synchronise.
    """

    def __init__(self, models: Sequence[nn.Module], device: torch.device):
        self.models, self._flag = models, torch.ones((), dtype=torch.int32, device=device)

    def take(self, numbers: Iterable[torch.Tensor]) -> None:
        """Add the losses and norms of a step that was not skipped."""
        self._flag *= torch.stack([number.float() for number in numbers]).isfinite().all()

    def everywhere(self) -> bool:
        """Whether the weights, and all that was added, are finite on every rank. Collective."""
        every = [local_of(weight.detach()) for model in self.models for weight in model.parameters()]
        # Codes of NF4 always are finite, and an empty shard has no maximum.
        local = [shard for shard in every if shard.is_floating_point() and shard.numel()]
        self._flag *= torch.nn.utils.get_total_norm(local, torch.inf).isfinite()
        torch.distributed.all_reduce(self._flag, torch.distributed.ReduceOp.MIN)
        return bool(self._flag.item())


class Ending:
    """Tells after each step whether it is the last: on a signal, all ranks stop after the same one.

    A signal reaches some ranks earlier than others, or one alone. The first that gets it writes the step after next into the
    process group's store. No rank ends that step before it can read this, since the collectives of a step make each rank
    wait for all others. On an accelerator the process runs ahead, so it first waits for the step before the last.
    """

    def __init__(self, asked: Callable[[], bool]):
        self.asked, self.store = asked, default_store()
        self._before: torch.Event | None = None

    def is_last(self, step: int) -> bool:
        """Whether all ranks end after `step`, which this one has taken."""
        if (device_type := default_device_type()) != "cpu":
            if self._before is not None:
                self._before.synchronize()
            self._before = torch.Event(device_type)
            self._before.record()
        if self.asked():
            self.store.compare_set(_LAST_STEP, "", str(step + 2))  # if no rank has
        return self.store.check([_LAST_STEP]) and int(self.store.get(_LAST_STEP)) <= step


def get_rng_state() -> dict[str, torch.Tensor]:
    """The states of torch's generators on this rank: the CPU's, and the accelerator's if there is one."""
    state = {"cpu": torch.get_rng_state()}
    if (device_type := default_device_type()) != "cpu":
        state[device_type] = torch.get_device_module(device_type).get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Set the generators to what `get_rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if (device_type := default_device_type()) != "cpu":
        torch.get_device_module(device_type).set_rng_state(state[device_type])
