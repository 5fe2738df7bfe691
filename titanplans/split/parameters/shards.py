"""This rank's shard of a full tensor, without communication.

`distribute_tensor` can't make the uneven strided shards of FSDP2 over tensor parallelism. This repeats what the
two did: TP cut the full tensor, FSDP2 cut TP's shard, both with `torch.chunk`.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from titanplans.errors import ModelError
from titanplans.torch_private.dtensor import StridedShard

_WEIGHTS = (
    "save full tensors by titanplans.gather_full_state_dict on every rank, which load_state_dict or "
    "titanplans.load_full_state_dict loads"
)
"""What to do instead of loading one rank's shards of a model's weights everywhere."""


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


def take_shards(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    """Replace full tensors in `state` by DTensors where `module` has such: a pre-hook of `load_state_dict`.

    `state` has the same values on every rank, so nothing is communicated. A wrong shape is left for `load_state_dict` to
    refuse.

    Raises:
        ModelError: `state` has the shard of another rank.
    """
    assigns = metadata.get("assign_to_params_buffers", False)
    for name, parameter in module._parameters.items():
        full = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(full, torch.Tensor):
            continue
        if isinstance(full, DTensor):
            refuse_shard_of_other_rank(full, parameter, prefix + name, _WEIGHTS)
            continue
        if full.shape != parameter.shape:
            continue
        part = local_shard(full.detach(), parameter.device_mesh, parameter.placements, name=prefix + name)
        # A view would keep the full one in memory.
        state[prefix + name] = as_shard_of(parameter, part.clone() if assigns else part)


def refuse_shard_of_other_rank(loaded: DTensor, own: DTensor, name: str, instead: str) -> None:
    """Refuse `loaded` if another rank has saved it, and has another shard of it than this rank, whose tensor is `own`.

    torch.load gives a DTensor the mesh of the rank that saved it, which is equal to this rank's mesh but for the
    coordinate, so torch takes the shard for this rank's.

    Raises:
        ModelError: `loaded`, called `name`, is such a shard; `instead` is the remedy.
    """
    theirs, ours = loaded.device_mesh, own.device_mesh
    if theirs is ours or theirs != ours:  # torch refuses a tensor on a mesh of other ranks
        return
    there, here = theirs.get_coordinate(), ours.get_coordinate()
    assert there is not None
    assert here is not None
    for placement, before, now in zip(loaded.placements, there, here, strict=True):
        if before != now and not placement.is_replicate():
            rank = int(theirs.mesh[tuple(there)])
            raise ModelError(
                f"{name} is the shard that rank {rank} saved, and this is another rank: {instead}"
            )


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
