"""The gradients of a parallel model as one vector: its norm, clipping it, and steps that are not finite.

torch's `get_total_norm` stacks one norm for each tensor, which fails where plain tensors and DTensors are mixed
and for DTensors of different meshes, and asks for one more collective for each. Here the local norms
are sorted by the groups that they still have to be summed over, and each group sums once.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from titanplans.errors import ParallelError
from titanplans.split.partial_gradients import summed
from titanplans.text import some
from titanplans.torch_private.dispatch import foreach_mul_, foreach_norm

Parameters = torch.Tensor | Iterable[torch.Tensor]
_ROW = 4096


@torch.no_grad()
def total_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    pp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the p-norm of all gradients of the full model, a plain float32 scalar (float64 for float64 gradients).

    A gradient counts by its placement: a plain tensor and a replicated DTensor once, however many ranks hold
    it; a sharded one by all its shards (some may be empty). A Partial one is reduced first
    (`align_gradients`), once: `parameter.grad` is the sum from then on.

    Collective: every rank calls it with the same parameters in the same order. One all-reduce of a few
    numbers for each process group that shards anything (TP, FSDP, …), and one for `pp_group`.

    Args:
        parameters: tensors of any devices, dtypes and meshes. Gradients below float32 are accumulated
            in float32, norms of tensors in float64.
        norm_type: p > 0; `inf` for the largest magnitude.
        error_if_nonfinite: raise if the norm is.
        pp_group: ranks that hold the other pipeline stages, whose parameters are others.

    Raises:
        ParallelError: `norm_type` is not positive, or the norm not finite where that is an error.
    """
    parameters = _listed(parameters)
    if not norm_type > 0:
        raise ParallelError(f"norm_type = {norm_type}: a norm's p is above 0, 'inf' included")
    align_gradients(parameters)
    device = _device(parameters)
    # A parameter without a gradient counts too, for its groups: ranks that have one wait for this rank there.
    members: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for param in parameters:
        local = members.setdefault(_sharding_groups(param if param.grad is None else param.grad), [])
        if param.grad is not None:
            local.append(local_of(param.grad))
    powers = [_zero(device), *(local_power(local, norm_type, device) for local in members.values())]
    for group in dict.fromkeys(group for groups in members for group in groups):
        rows = [row for row, groups in enumerate(members, start=1) if group in groups]
        # Not powers[rows] of one tensor: rows would be copied to the device, which waits for it.
        reduced = _reduced(torch.stack([powers[row] for row in rows]), norm_type, group)
        for row, power in zip(rows, reduced.unbind(), strict=True):
            powers[row] = power
    all_powers = torch.stack(powers)
    power = all_powers.amax() if math.isinf(norm_type) else all_powers.sum()
    if pp_group is not None:
        power = _reduced(power, norm_type, pp_group)
    double = any(grad.dtype == torch.float64 for local in members.values() for grad in local)
    norm = (power if math.isinf(norm_type) else power ** (1.0 / norm_type)).to(
        torch.float64 if double else torch.float32
    )
    if error_if_nonfinite and not torch.isfinite(norm).item():
        raise ParallelError(
            f"the {norm_type:g}-norm of the gradients is {norm.item()}: lower the learning rate, or skip such steps"
        )
    return norm


@torch.no_grad()
def clip_gradients(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    pp_group: dist.ProcessGroup | None = None,
    counted: Parameters | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm before that.

    The factor is torch's, max_norm / (norm + 1e-6), at most 1; nothing waits for the device. A norm that
    is not finite leaves no gradient finite: see `skip_nonfinite`. The arguments are those of `total_norm`;
    `max_norm` may be `inf`, which measures only. Of the norm are the `counted` parameters, all unless given: another
    stage of a pipeline counts those that it holds, too.

    Raises:
        ParallelError: as `total_norm`, or `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ParallelError(f"max_norm = {max_norm}: a norm to clip to is above 0; 'inf' only measures")
    parameters = _listed(parameters)
    of_norm = parameters if counted is None else counted
    norm = total_norm(of_norm, norm_type, error_if_nonfinite=error_if_nonfinite, pp_group=pp_group)
    if math.isinf(max_norm):
        return norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    local = [local_of(param.grad) for param in parameters if param.grad is not None]
    for (device, _), grads in _alike(local).items():
        foreach_mul_(grads, factor.to(device))
    return norm


@torch.no_grad()
def align_gradients(parameters: Parameters) -> None:
    """Give each gradient its parameter's layout, in `parameter.grad`: a Partial one is summed over its ranks.

    FSDP has done so for parameters that it manages; without it, a parameter that is replicated inside a
    tensor-parallel region still has one partial sum a rank after the backward. A gradient on another
    mesh than its parameter's stays there, and is reduced. Collective.
    """
    held = [(param, param.grad) for param in _listed(parameters) if isinstance(param.grad, DTensor)]
    for (param, _), grad in zip(held, summed([grad for _, grad in held]), strict=True):
        assert isinstance(grad, DTensor)
        if isinstance(param, DTensor) and param.device_mesh == grad.device_mesh:
            placements = tuple(param.placements)
        else:
            placements = tuple(Replicate() if p.is_partial() else p for p in grad.placements)
        if placements != tuple(grad.placements):
            grad = grad.redistribute(placements=placements)
        if grad is not param.grad:
            param.grad = grad


def skip_nonfinite(norm: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether this step is to be skipped, because `norm` is NaN or infinite on any rank.

    The answer is the same on every rank, so that optimizers stay in step. One all-reduce of a number,
    and the one wait of the host for the device.

    Args:
        norm: what `total_norm` or `clip_gradients` returned.
        group: ranks that decide together; None for all.
    """
    bad = (~torch.isfinite(norm.detach())).to(torch.float32)
    if dist.is_initialized():
        dist.all_reduce(bad, dist.ReduceOp.MAX, group)
    return bool(bad.item())


def check_no_meta(model: nn.Module) -> None:
    """Check that every parameter and buffer of `model` has left the meta device.

    Raises:
        ParallelError: names those that have not.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in named if local_of(tensor).device.type == "meta"]
    if left:
        raise ParallelError(
            f"still on meta, without values: {some(left, 5)}: call to_empty() and initialise the model, "
            "or load a checkpoint into it, before it trains"
        )


def _listed(parameters: Parameters) -> Sequence[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _device(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return where the norms are put together: where collectives of the meshes run, under CPU offload too."""
    for param in parameters:
        if isinstance(param, DTensor):
            kind = param.device_mesh.device_type
            local = local_of(param).device
            return local if local.type == kind else torch.empty(0, device=kind).device
    return parameters[0].device if parameters else torch.device("cpu")


def _sharding_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups whose ranks hold different shards of `tensor`."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )


def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def local_power(local: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the sum of |g|^p over all elements on this rank, or their maximum for p = inf; float64."""
    norms = [_zero(device).reshape(1)]
    for (kind, dtype), grads in _alike(local).items():
        wide = torch.promote_types(dtype, torch.float32)
        if kind.type == "cpu":
            parts = [norm for grad in grads for norm in _norms_of_rows(grad, norm_type, wide)]
        else:
            parts = [torch.stack(foreach_norm(grads, norm_type, dtype=wide))]
        norms += [part.to(device, torch.float64) for part in parts]
    each = torch.cat(norms)
    return each.amax() if math.isinf(norm_type) else each.pow(norm_type).sum()


def _norms_of_rows(grad: torch.Tensor, norm_type: float, wide: torch.dtype) -> list[torch.Tensor]:
    """Return the norms of `grad` in pieces: on a CPU torch adds a whole tensor's squares up one by one.

    In float32 that is 1e-3 off for 16 million normal numbers, 1e-2 for equal ones.
    """
    flat = grad.reshape(-1)
    rows = flat[: flat.numel() // _ROW * _ROW].view(-1, _ROW)
    pieces = [piece for piece in (rows, flat[rows.numel() :]) if piece.numel()]
    return [torch.linalg.vector_norm(piece, norm_type, dim=-1, dtype=wide).reshape(-1) for piece in pieces]


def _alike(tensors: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return the tensors by device and dtype, without the empty ones, which have no maximum."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return alike


def _reduced(powers: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    if not math.isinf(norm_type):
        dist.all_reduce(powers, dist.ReduceOp.SUM, group)
        return powers
    nan = powers.isnan()  # a maximum over ranks may drop a NaN
    both = torch.stack([powers.masked_fill(nan, 0.0), nan.to(powers.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return both[0].masked_fill(both[1] > 0, math.nan)
