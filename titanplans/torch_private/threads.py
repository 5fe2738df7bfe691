"""Process groups whose ranks are threads of one process."""

import copy
import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded_groups

from titanplans.torch_private.dispatch import tree_map_only
from titanplans.torch_private.dtensor import DTensorSpec
from titanplans.torch_private.swapped import swapped

__all__ = [
    "groups_of_threads",
    "meshes_by_thread",
    "shared_shardings",
    "threaded_groups",
]


@contextmanager
def groups_of_threads() -> Iterator[None]:
    """In the body each thread has separate process groups, which are created without waiting for the other ranks."""
    excepthook = sys.excepthook  # each process group of torch replaces the hook by a wrapper
    barrier = os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    threads = torch._C._is_multithreading_enabled()
    # In a CUDA build on a machine without a GPU, the first thread that makes fake tensors sets the device guard for all
    # threads, and the guard becomes invalid when that thread ends. So this thread, which outlives the ranks, sets the
    # guard first.
    torch._C._ensureCUDADeviceGuardSet()
    world = threaded_groups._install_threaded_pg()
    # torch 2.11 does not destroy groups without this attribute, which stays empty.
    if not hasattr(world, "comms"):
        world.comms = []  # pyrefly: ignore[read-only]
    try:
        yield
    finally:
        threaded_groups._uninstall_threaded_pg()
        torch.autograd.set_multithreading_enabled(threads)  # torch 2.11 leaves it disabled
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        sys.excepthook = excepthook
        if barrier is not None:
            os.environ["TORCH_DIST_INIT_BARRIER"] = barrier


@contextmanager
def shared_shardings() -> Iterator[None]:
    """Share DTensor's shardings of operators between threads. torch caches them per thread, and each takes milliseconds."""
    propagator, cache = DTensor._op_dispatcher.sharding_propagator, {}
    propagate = propagator.propagate_op_sharding_non_cached

    def without_mesh(value: Any, meshes: list[DeviceMesh]) -> Any:
        if isinstance(value, DTensorSpec):
            meshes.append(value.mesh)
            return value.placements, value.shard_order, value.tensor_meta
        if isinstance(value, list | tuple):
            return tuple(without_mesh(one, meshes) for one in value)
        return type(value), value

    def with_mesh(mesh: DeviceMesh, spec: DTensorSpec) -> DTensorSpec:
        moved = copy.copy(spec)
        moved.mesh = mesh
        return moved

    def propagate_cached(schema: Any) -> Any:
        meshes: list[DeviceMesh] = []
        args = without_mesh([schema.args_schema, [*schema.kwargs_schema.items()]], meshes)
        if len({id(mesh) for mesh in meshes}) != 1:
            return propagate(schema)
        mesh, key = meshes[0], (schema.op, meshes[0].device_type, tuple(meshes[0].shape), args)
        if (sharding := cache.get(key)) is not None:
            specs = tree_map_only(DTensorSpec, functools.partial(with_mesh, mesh), sharding.output_spec)
            return replace(sharding, output_spec=specs)
        sharding = propagate(schema)
        if sharding.redistribute_schema is None:  # a redistribution contains the mesh in further places
            cache[key] = sharding
        return sharding

    with swapped(propagator, "propagate_op_sharding_non_cached", propagate_cached):
        yield


@contextmanager
def meshes_by_thread() -> Iterator[None]:
    """Make equal meshes of different threads unequal, so that caches keyed by mesh are separate for each thread."""
    original = DeviceMesh.__init__

    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # The hash of a mesh includes the thread's id, but torch sets this id only for its own backend "threaded".
        self._thread_id, self._hash = threading.get_ident(), None

    with swapped(DeviceMesh, "__init__", init):
        yield
