"""This rank's shard of a full tensor, without communication."""

import math

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from titanplans.errors import ModelError
from titanplans.torch_private.dtensor import StridedShard


def copy_shard(destination: torch.Tensor, full: torch.Tensor, *, name: str) -> None:
    """Write this rank's shard of `full` into `destination`, in place, converting dtype and device.

    Args:
        destination: a plain tensor of `full`'s shape, or a DTensor of that global shape with any mix of Replicate,
            Shard and StridedShard placements, uneven and empty shards included.
        full: the full tensor, equal on every rank.
        name: the parameter's name, for errors.

    Raises:
        ModelError: the shapes differ, or a placement is none of the three.
    """
    if destination.shape != full.shape:
        raise ModelError(
            f"{name} has the shape {tuple(destination.shape)}, its config gives {tuple(full.shape)}: "
            "was the model built from another config?"
        )
    with torch.no_grad():
        if not isinstance(destination, DTensor):
            destination.copy_(full)
            return
        shard = local_shard(full, destination.device_mesh, destination.placements, name=name)
        destination.to_local().copy_(shard)


def as_shard_of(full: DTensor, shard: torch.Tensor) -> DTensor:
    """Return `shard`, this rank's shard of a tensor with the layout of `full`, as a DTensor."""
    return DTensor.from_local(
        shard,
        full.device_mesh,
        full.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def local_shard(
    full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], *, name: str
) -> torch.Tensor:
    """Return this rank's shard of `full` under `placements`, as a view; empty if this rank holds nothing.

    `distribute_tensor` can't make the uneven strided shards of FSDP2 on top of tensor parallelism. This repeats the two
    steps: TP splits the full tensor, and FSDP2 splits TP's shard, both as `torch.chunk` does.
    """
    shard, coordinate = full, mesh.get_coordinate()
    assert coordinate is not None
    for axis, dim in sharding_axes(mesh, placements, name=name):
        chunks, index = shard.chunk(mesh.size(axis), dim=dim), coordinate[axis]
        shard = chunks[index] if index < len(chunks) else shard.narrow(dim, 0, 0)
    return shard


def sharding_axes(mesh: DeviceMesh, placements: tuple[Placement, ...], *, name: str) -> list[tuple[int, int]]:
    """Return the mesh axes that shard a tensor, each with the dimension that it shards, in the order of splitting.

    Raises:
        ModelError: a placement is neither Replicate, Shard nor StridedShard, or the split factor of a StridedShard is
            not the number of shards that earlier axes make of its dimension.
    """
    strided = [axis for axis, placement in enumerate(placements) if isinstance(placement, StridedShard)]
    plain = [axis for axis in range(len(placements)) if axis not in strided]
    axes = []
    # A strided shard is split after the mesh axes to its right that shard the same tensor dimension.
    for axis in plain + strided:
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | StridedShard):
            raise ModelError(f"{name}: can't take a shard of a tensor with the placement {placement}")
        if isinstance(placement, StridedShard):
            before = math.prod(
                mesh.size(later)
                for later, other in enumerate(placements)
                if later > axis and isinstance(other, Shard) and other.dim == placement.dim
            )
            if placement.split_factor != before:
                raise ModelError(
                    f"{name}: {placement} on mesh axis {axis} of {mesh} expects {placement.split_factor} "
                    f"earlier shards, placements {placements} make {before}"
                )
        axes.append((axis, placement.dim))
    return axes
