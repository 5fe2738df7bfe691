"""DTensor and its meshes."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "DTensorSpec",
    "StridedShard",
    "clear_sharding_cache",
    "concatenate_meshes",
    "flatten_mesh",
    "local_tensor",
    "spec_as",
    "spec_of",
    "with_spec",
]


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor itself: `to_local` would make a view, which records a gradient."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the spec of `tensor`: its mesh, placements, shape, strides and dtype."""
    return tensor._spec


def spec_as(spec: DTensorSpec, *placements: Placement) -> DTensorSpec:
    """Return the spec of a contiguous tensor that is otherwise as `spec`, with other placements."""
    stride, size = [], 1
    for length in reversed(spec.shape):
        stride.append(size)
        size *= max(length, 1)
    meta = spec.tensor_meta._replace(stride=tuple(reversed(stride)))  # type: ignore[union-attr]
    return DTensorSpec(spec.mesh, placements, tensor_meta=meta)


def with_spec(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor of `local` and `spec` as they are: `from_local` makes and hashes a spec each time.

    Its `__init__` does nothing, in three times the time of its `__new__`: the compiler is kept out of it.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the dimensions of several, which are slices of one root mesh."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a 1-D mesh called `name` over the ranks of `mesh`; makes a process group."""
    return mesh._flatten(name)


def clear_sharding_cache() -> None:
    """Forget how DTensor has sharded operators."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imports the compiler

    _clear_sharding_prop_cache()
