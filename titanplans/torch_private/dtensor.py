"""DTensor and its meshes."""

from collections.abc import Sequence
from typing import Any

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
    "handed",
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


class _Handed(DTensor):
    """A gradient on its way to a parameter, which takes it as a plain DTensor, in a third of the time.

    Autograd detaches what it accumulates, which DTensor does as any operator: it looks for a sharding and hashes specs.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DETACH:
            (gradient,) = args
            return with_spec(gradient._local_tensor.detach(), gradient._spec)
        return super().__torch_dispatch__(func, types, args, kwargs)


_DETACH = torch.ops.aten.detach.default
_HANDED: type[DTensor] = _Handed if torch.__version__ >= "2.13" else DTensor
"""Earlier releases know no subclass of DTensor."""


def handed(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor as `with_spec`, for a parameter to accumulate in a backward."""
    return DTensor.__new__(_HANDED, local, spec, requires_grad=False)


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
