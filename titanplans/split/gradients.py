"""The gradients of a parallel model as one vector: `total_norm`, `clip_gradients`, `skip_nonfinite`."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from titanplans.errors import ParallelError
from titanplans.split.partial_gradients import sum_partial
from titanplans.text import some
from titanplans.torch_private.dispatch import foreach_mul_, foreach_norm

Parameters = torch.Tensor | Iterable[torch.Tensor]
_CHUNK = 4096
"""Elements whose norm is computed at once on a CPU."""


@torch.no_grad()
def total_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    pp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the p-norm of all gradients of the full model: a plain float32 scalar, float64 if a gradient is float64.

    A plain tensor and a replicated DTensor count once, however many ranks hold them. A sharded DTensor counts with all
    of its shards, some of which may be empty. A Partial DTensor is first reduced by `align_gradients`, and
    `parameter.grad` is the sum from then on.

    Collective: every rank calls it with the same parameters in the same order. It issues one small all-reduce for each
    process group that shards anything (TP, FSDP, ...), and one for `pp_group`.

    Args:
        parameters: tensors of any devices, dtypes and meshes. Gradients narrower than float32 are accumulated in float32,
            and the norms of tensors in float64.
        norm_type: p > 0; `inf` for the largest magnitude.
        error_if_nonfinite: raise if the norm is not finite.
        pp_group: the pipeline ranks, each of which has the parameters of a different stage.

    Raises:
        ParallelError: `norm_type` is not positive, or the norm is not finite and `error_if_nonfinite` is set.
    """
    parameters = _listed(parameters)
    if not norm_type > 0:
        raise ParallelError(f"norm_type = {norm_type}: p has to be positive; 'inf' is allowed")
    align_gradients(parameters)
    device = _device(parameters)
    # torch's `get_total_norm` stacks one norm per tensor, which fails for a mix of plain tensors and DTensors and for
    # DTensors on different meshes, and needs one collective per DTensor. Here norms are grouped by the process groups
    # that still have to sum them. A parameter without a gradient registers its groups, too: the other ranks of a group
    # wait for this rank.
    members: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for param in parameters:
        local = members.setdefault(_sharding_groups(param if param.grad is None else param.grad), [])
        if param.grad is not None:
            local.append(local_of(param.grad))
    powers = [_zero(device), *(local_power(local, norm_type, device) for local in members.values())]
    for group in dict.fromkeys(group for groups in members for group in groups):
        indices = [index for index, groups in enumerate(members, start=1) if group in groups]
        # Indexing one tensor by a list would copy the list to the device, which synchronises.
        reduced = _reduced(torch.stack([powers[index] for index in indices]), norm_type, group)
        for index, power in zip(indices, reduced.unbind(), strict=True):
            powers[index] = power
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
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm before clipping.

    The factor is torch's, max_norm / (norm + 1e-6), at most 1, and the host does not wait for the device. If the norm
    is not finite, no gradient stays finite: see `skip_nonfinite`.

    Args:
        parameters: the parameters whose gradients are scaled.
        max_norm: positive; `inf` only measures.
        norm_type, error_if_nonfinite, pp_group: as in `total_norm`.
        counted: the parameters that the norm covers; None: all. A parameter that several pipeline stages hold must be
            counted by only one of them.

    Raises:
        ParallelError: as in `total_norm`, or `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ParallelError(
            f"max_norm = {max_norm}: the norm to clip to has to be positive; 'inf' only measures"
        )
    parameters = _listed(parameters)
    counted = parameters if counted is None else counted
    norm = total_norm(counted, norm_type, error_if_nonfinite=error_if_nonfinite, pp_group=pp_group)
    if math.isinf(max_norm):
        return norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    local = [local_of(param.grad) for param in parameters if param.grad is not None]
    for (device, _), grads in _by_device_and_dtype(local).items():
        foreach_mul_(grads, factor.to(device))
    return norm


@torch.no_grad()
def align_gradients(parameters: Parameters) -> None:
    """Redistribute each `parameter.grad` to the parameter's placements; Partial gradients are summed over the ranks.

    FSDP has already reduced the gradients of the parameters that it manages. Without FSDP a parameter that is replicated
    inside a tensor-parallel region still has a partial gradient after the backward. A gradient on another mesh than its
    parameter's stays on that mesh, and is reduced. Collective.
    """
    pairs = [(param, param.grad) for param in _listed(parameters) if isinstance(param.grad, DTensor)]
    for (param, _), grad in zip(pairs, sum_partial([grad for _, grad in pairs]), strict=True):
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
    """Return whether to skip this step because `norm` is NaN or infinite on any rank.

    The answer is the same on every rank, so that optimizers stay in step. It costs one all-reduce of one number, and
    the host waits for the device.

    Args:
        norm: the result of `total_norm` or `clip_gradients`.
        group: the ranks that decide together; None: all ranks.
    """
    is_bad = (~torch.isfinite(norm.detach())).to(torch.float32)
    if dist.is_initialized():
        dist.all_reduce(is_bad, dist.ReduceOp.MAX, group)
    return bool(is_bad.item())


def check_no_meta(model: nn.Module) -> None:
    """Check that no parameter or buffer of `model` is on the meta device.

    Raises:
        ParallelError: some are; the message names them.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, tensor in named if local_of(tensor).device.type == "meta"]
    if on_meta:
        raise ParallelError(
            f"still on meta, without values: {some(on_meta, 5)}: call to_empty() and initialise the model, "
            "or load a checkpoint into it, before it trains"
        )


def _listed(parameters: Parameters) -> Sequence[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _device(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return the device on which norms are reduced: the mesh's, even if parameters are offloaded to the CPU."""
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
    """Return the sum of |g|^p over all elements on this rank, or their maximum for p = inf, in float64."""
    norms = [_zero(device).reshape(1)]
    for (kind, dtype), grads in _by_device_and_dtype(local).items():
        wide = torch.promote_types(dtype, torch.float32)
        if kind.type == "cpu":
            computed = [norm for grad in grads for norm in _norms_of_chunks(grad, norm_type, wide)]
        else:
            computed = [torch.stack(foreach_norm(grads, norm_type, dtype=wide))]
        norms += [norm.to(device, torch.float64) for norm in computed]
    all_norms = torch.cat(norms)
    return all_norms.amax() if math.isinf(norm_type) else all_norms.pow(norm_type).sum()


def _norms_of_chunks(grad: torch.Tensor, norm_type: float, wide: torch.dtype) -> list[torch.Tensor]:
    """Return the norms of chunks of `grad`.

    On a CPU torch adds up the squares of a tensor one by one. In float32 the error of such a sum is 1e-3 for 16 million
    normally distributed numbers, and 1e-2 for equal ones.
    """
    flat = grad.reshape(-1)
    chunks = flat[: flat.numel() // _CHUNK * _CHUNK].view(-1, _CHUNK)
    remainder = flat[chunks.numel() :]
    return [
        torch.linalg.vector_norm(x, norm_type, dim=-1, dtype=wide).reshape(-1)
        for x in (chunks, remainder)
        if x.numel()
    ]


def _by_device_and_dtype(
    tensors: list[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Group the tensors by device and dtype, without empty ones, which have no maximum."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def _reduced(powers: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    if not math.isinf(norm_type):
        dist.all_reduce(powers, dist.ReduceOp.SUM, group)
        return powers
    nan = powers.isnan()  # a MAX reduction may drop a NaN, so NaNs are reduced separately
    both = torch.stack([powers.masked_fill(nan, 0.0), nan.to(powers.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return both[0].masked_fill(both[1] > 0, math.nan)
