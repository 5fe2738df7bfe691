"""`sum_partial`: sum the partial gradients of replicated parameters over their ranks.

The gradients of a block's norms, biases and adapters are partial (see `titanplans.styles`) and small. FSDP calls this
for the gradients of an FSDP module when its backward ends; without FSDP `gradients.align_gradients` calls it before the
optimizer's step. Until then the gradients stay Partial.
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from titanplans.split.raw_collectives import all_reduce
from titanplans.torch_private.dtensor import local_tensor, spec_as, spec_of, with_spec

LARGE = 2**20
"""A gradient of this many bytes or more is reduced alone: copying it would cost more than starting another collective."""


@torch.no_grad()
def sum_partial(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `grads` with each Partial DTensor summed over its ranks: its Partial placements become Replicate.

    Small gradients of one mesh, dtype and device are concatenated and reduced by one all-reduce.

    Collective: every rank calls it with gradients of the same parameters in the same order.
    """
    reduced = list(grads)
    buckets: dict[
        tuple[DeviceMesh, tuple[int, ...], torch.dtype, torch.device], list[tuple[int, DTensor]]
    ] = {}
    for index, grad in enumerate(grads):
        if not isinstance(grad, DTensor) or not any(p.is_partial("sum") for p in grad.placements):
            continue
        local = local_tensor(grad)
        if local.is_contiguous() and not _is_large(local):
            dims = tuple(dim for dim, p in enumerate(grad.placements) if p.is_partial("sum"))
            buckets.setdefault((grad.device_mesh, dims, local.dtype, local.device), []).append((index, grad))
        else:
            reduced[index] = grad.redistribute(placements=_summed_placements(grad))
    for (mesh, dims, _, _), bucket in buckets.items():
        flat = torch.cat([local_tensor(grad).view(-1) for _, grad in bucket])
        for dim in dims:
            flat = all_reduce(flat, (mesh.get_group(dim).group_name, mesh.size(dim)))
        sums = flat.split([local_tensor(grad).numel() for _, grad in bucket])
        for (index, grad), total in zip(bucket, sums, strict=True):
            spec = spec_as(spec_of(grad), *_summed_placements(grad))
            reduced[index] = with_spec(total.view(local_tensor(grad).shape), spec)
    return reduced


def _summed_placements(grad: DTensor) -> tuple[Placement, ...]:
    return tuple(Replicate() if p.is_partial("sum") else p for p in grad.placements)


def _is_large(grad: torch.Tensor) -> bool:
    return grad.numel() * grad.element_size() >= LARGE
