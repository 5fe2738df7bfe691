"""Partial gradients of replicated parameters, summed over their ranks together.

Each rank has followed its own share of the paths to the loss (see `titanplans.styles`), so the gradients of a block's norms,
biases and adapters are sums over the ranks: many small ones. They are summed in one all-reduce for each mesh, dtype and
device: by FSDP those of a unit as its backward ends, without FSDP all of them before the optimizer's step
(`gradients.align_gradients`). Until then they are Partial, whoever reads them.
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from titanplans.split.raw_collectives import all_reduce
from titanplans.torch_private.dtensor import local_tensor, spec_as, spec_of, with_spec

LARGE = 2**20
"""Bytes from which a gradient is summed by itself: a copy of it would cost more than a collective's start."""


@torch.no_grad()
def summed(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `grads`, with each that is Partial summed over its ranks: a DTensor that is Replicate there.

    Collective: every rank calls it with gradients of the same parameters in the same order.
    """
    found = list(grads)
    alike: dict[tuple[DeviceMesh, tuple[int, ...], torch.dtype, torch.device], list[tuple[int, DTensor]]] = {}
    for at, grad in enumerate(grads):
        if not isinstance(grad, DTensor) or not any(p.is_partial("sum") for p in grad.placements):
            continue
        local = local_tensor(grad)
        if local.is_contiguous() and not _is_large(local):
            dims = tuple(dim for dim, p in enumerate(grad.placements) if p.is_partial("sum"))
            alike.setdefault((grad.device_mesh, dims, local.dtype, local.device), []).append((at, grad))
        else:
            found[at] = grad.redistribute(placements=_whole(grad))
    for (mesh, dims, _, _), places in alike.items():
        flat = torch.cat([local_tensor(grad).view(-1) for _, grad in places])
        for dim in dims:
            flat = all_reduce(flat, (mesh.get_group(dim).group_name, mesh.size(dim)))
        parts = flat.split([local_tensor(grad).numel() for _, grad in places])
        for (at, grad), part in zip(places, parts, strict=True):
            found[at] = with_spec(part.view(local_tensor(grad).shape), spec_as(spec_of(grad), *_whole(grad)))
    return found


def _whole(grad: DTensor) -> tuple[Placement, ...]:
    """Return the placements of `grad` once it is summed."""
    return tuple(Replicate() if p.is_partial("sum") else p for p in grad.placements)


def _is_large(grad: torch.Tensor) -> bool:
    return grad.numel() * grad.element_size() >= LARGE
