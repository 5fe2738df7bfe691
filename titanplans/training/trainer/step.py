"""How torchtitan's training step differs here: clipping, skipped steps, whole sequences, random states, the last step.

`train_step` has no hook between the last backward and the optimizer. The norm is computed in `titanplans.split.gradients`.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.utils import device_module, device_type

from titanplans.split.gradients import clip_gradients, local_of, skip_nonfinite
from titanplans.torch_private.distributed import default_store
from titanplans.torch_private.swapped import swapped

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


def clipping(clip: Callable[[list[torch.Tensor], float], torch.Tensor]) -> AbstractContextManager[None]:
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
        if device_type != "cpu":
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
    if device_type != "cpu":
        state[device_type] = device_module.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Set the generators to what `get_rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if device_type != "cpu":
        device_module.set_rng_state(state[device_type])


class WholeSequences(ParallelDims):
    """torchtitan's, for whose trainer and validator there is nothing to cut by tokens.

    Under context parallelism torchtitan cuts ids, labels and positions before the model, for its own attention. Here each
    rank of a group reads whole sequences, the model cuts them, and each rank has a part of their loss.
    """

    @property
    def cp_enabled(self) -> bool:
        """False: asked where ids and labels are cut."""
        return False

    def get_optional_mesh(self, dims: str | list[str], **options: Any) -> DeviceMesh | None:
        """torchtitan's; None for "pp", by which it would give stages other seeds, and clip."""
        return None if dims == "pp" else super().get_optional_mesh(dims, **options)

    def get_mesh(self, dims: str | list[str]) -> DeviceMesh:
        """torchtitan's, "pp" included."""
        mesh = super().get_optional_mesh(dims)
        return super().get_mesh(dims) if mesh is None else mesh

    @property
    def dp_cp_enabled(self) -> bool:
        """Whether several ranks have a part of the loss."""
        return self.dp_enabled or self.cp > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether several ranks have a part of each weight."""
        return self.dp_shard_enabled or self.cp > 1


def whole_batches(dims: ParallelDims) -> AbstractContextManager[None]:
    """Let torchtitan's `train_step` find the largest of the batches' mean losses, and not of their parts.

    It calls `torchtitan.distributed.utils.dist_max`, which is replaced only while the body runs.
    """
    if dims.cp == 1:
        return nullcontext()
    largest, group = dist_utils.dist_max, dims.get_mesh("cp").get_group()

    def of_batches(x: torch.Tensor, *args: Any, **kwargs: Any) -> float:
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return largest(whole, *args, **kwargs)

    return swapped(dist_utils, "dist_max", of_batches)
