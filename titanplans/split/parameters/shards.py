"""This rank's shard of a full tensor, without communication.

`distribute_tensor` can't make the uneven strided shards of FSDP2 over tensor parallelism. This repeats what the
two did: TP cut the full tensor, FSDP2 cut TP's shard, both with `torch.chunk`.
"""

import math

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from titanplans.errors import ModelError
from titanplans.torch_private.dtensor import StridedShard


def copy_shard(destination: torch.Tensor, full: torch.Tensor, *, name: str) -> None:
    """Write this rank's shard of `full` into `destination`, in place, converting dtype and device.

    Args:
        destination: a plain tensor of `full`'s shape, or a DTensor of that global shape with any mix
            of Replicate, Shard and StridedShard placements, uneven and empty shards included.
        full: the full tensor, equal on every rank.
        name: the parameter's name, for errors.

    Raises:
        ModelError: shapes differ, or a placement that is none of the three.
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
        part = local_shard(full, destination.device_mesh, destination.placements, name=name)
        destination.to_local().copy_(part)


def as_shard_of(full: DTensor, part: torch.Tensor) -> DTensor:
    """Return `part`, this rank's shard of a tensor that is laid out as `full`, as a DTensor."""
    return DTensor.from_local(
        part,
        full.device_mesh,
        full.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def local_shard(
    full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], *, name: str
) -> torch.Tensor:
    """Return this rank's view of `full` under `placements`: empty where it holds nothing."""
    part, coordinate = full, mesh.get_coordinate()
    assert coordinate is not None
    for axis, dim in cut_axes(mesh, placements, name=name):
        chunks, index = part.chunk(mesh.size(axis), dim=dim), coordinate[axis]
        part = chunks[index] if index < len(chunks) else part.narrow(dim, 0, 0)
    return part


def cut_axes(mesh: DeviceMesh, placements: tuple[Placement, ...], *, name: str) -> list[tuple[int, int]]:
    """Return the axes of the mesh that shard a tensor, each with the dimension that it shards, in order.

    Each cuts the shard that those before it have left, as `torch.chunk` does.

    Raises:
        ModelError: a placement that is neither Replicate, Shard nor StridedShard, or a strided one of another order.
    """
    strided = [axis for axis, placement in enumerate(placements) if isinstance(placement, StridedShard)]
    plain = [axis for axis in range(len(placements)) if axis not in strided]
    cuts = []
    # A strided shard says: cut after the mesh axes to its right that share its tensor dimension.
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
        cuts.append((axis, placement.dim))
    return cuts
