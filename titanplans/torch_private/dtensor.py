"""DTensor and DeviceMesh."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from titanplans.torch_private.swapped import swapped

__all__ = [
    "DTensorSpec",
    "StridedShard",
    "clear_sharding_cache",
    "concatenate_meshes",
    "flatten_mesh",
    "gradient_with_spec",
    "local_tensor",
    "spec_as",
    "spec_of",
    "watch_shape_propagation",
    "with_spec",
]


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor itself, where `to_local` would make a view with a gradient."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the spec of `tensor`: its mesh, placements, shape, strides and dtype."""
    return tensor._spec


def spec_as(spec: DTensorSpec, *placements: Placement) -> DTensorSpec:
    """Return a copy of `spec` with other placements and the strides of a contiguous tensor."""
    stride, size = [], 1
    for length in reversed(spec.shape):
        stride.append(size)
        size *= max(length, 1)
    meta = spec.tensor_meta._replace(stride=tuple(reversed(stride)))  # type: ignore[union-attr]
    return DTensorSpec(spec.mesh, placements, tensor_meta=meta)


def with_spec(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor of `local` and `spec`, without the checks of `from_local`, which makes and hashes a new spec."""
    # `__new__`, because `__init__` does nothing but takes three times as long, since Dynamo is disabled in it.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


class _Gradient(DTensor):
    """A gradient to be accumulated, with a fast `detach` that makes it a plain DTensor.

    Autograd detaches a gradient before it accumulates it. DTensor dispatches `detach` like any operator, with a sharding
    lookup and hashes of specs, which takes three times as long.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DETACH:
            (gradient,) = args
            return with_spec(gradient._local_tensor.detach(), gradient._spec)
        return super().__torch_dispatch__(func, types, args, kwargs)


_DETACH = torch.ops.aten.detach.default
_GRADIENT: type[DTensor] = _Gradient if torch.__version__ >= "2.13" else DTensor
"""Earlier releases do not support subclasses of DTensor."""


def gradient_with_spec(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor as `with_spec` does, for a parameter's gradient that a backward returns."""
    return DTensor.__new__(_GRADIENT, local, spec, requires_grad=False)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the dimensions of all `meshes`, which are submeshes of one root mesh."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a 1-D mesh called `name` over the ranks of `mesh`. Creates a process group."""
    return mesh._flatten(name)


def clear_sharding_cache() -> None:
    """Clear DTensor's cache of operator shardings."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imports the compiler

    _clear_sharding_prop_cache()


@contextmanager
def watch_shape_propagation(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """In the body, enter `context()` whenever DTensor propagates shapes.

    To propagate shapes, DTensor runs an operator on fake tensors of global shape, once for each shape. A recorder would
    mistake them for tensors of a model that runs on fake tensors.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagate = propagator._propagate_tensor_meta_non_cached

    def propagate_in_context(schema: Any) -> Any:
        with context():
            return propagate(schema)

    with swapped(propagator, "_propagate_tensor_meta_non_cached", propagate_in_context):
        yield
