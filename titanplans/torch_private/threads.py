"""Ranks that are threads of one process."""

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
    """Give every thread its own process groups, which are made without waiting for all of their ranks."""
    excepthook = sys.excepthook  # torch puts its own before it with each process group
    barrier = os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    threads = torch._C._is_multithreading_enabled()
    # A build for CUDA, on a machine without a GPU, leaves the device guard of the first thread that makes fake tensors
    # to all others, also after that thread has ended. This one outlives the ranks.
    torch._C._ensureCUDADeviceGuardSet()
    world = threaded_groups._install_threaded_pg()
    if not hasattr(world, "comms"):  # torch 2.11, which then takes no group down; nothing is ever in it
        world.comms = []  # pyrefly: ignore[read-only]
    try:
        yield
    finally:
        threaded_groups._uninstall_threaded_pg()
        torch.autograd.set_multithreading_enabled(threads)  # torch 2.11 leaves it off
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        sys.excepthook = excepthook
        if barrier is not None:
            os.environ["TORCH_DIST_INIT_BARRIER"] = barrier


@contextmanager
def shared_shardings() -> Iterator[None]:
    """Let threads that are ranks share how DTensor shards an operator, which it finds out by thread, in milliseconds."""
    propagator, known = DTensor._op_dispatcher.sharding_propagator, {}
    find = propagator.propagate_op_sharding_non_cached

    def without_mesh(value: Any, meshes: list[DeviceMesh]) -> Any:
        if isinstance(value, DTensorSpec):
            meshes.append(value.mesh)
            return value.placements, value.shard_order, value.tensor_meta
        if isinstance(value, list | tuple):
            return tuple(without_mesh(one, meshes) for one in value)
        return type(value), value

    def on(mesh: DeviceMesh, spec: DTensorSpec) -> DTensorSpec:
        there = copy.copy(spec)
        there.mesh = mesh
        return there

    def shared(schema: Any) -> Any:
        meshes: list[DeviceMesh] = []
        args = without_mesh([schema.args_schema, [*schema.kwargs_schema.items()]], meshes)
        if len({id(mesh) for mesh in meshes}) != 1:
            return find(schema)
        mesh, key = meshes[0], (schema.op, meshes[0].device_type, tuple(meshes[0].shape), args)
        if (found := known.get(key)) is not None:
            specs = tree_map_only(DTensorSpec, functools.partial(on, mesh), found.output_spec)
            return replace(found, output_spec=specs)
        found = find(schema)
        if found.redistribute_schema is None:
            known[key] = found
        return found

    with swapped(propagator, "propagate_op_sharding_non_cached", shared):
        yield


@contextmanager
def meshes_by_thread() -> Iterator[None]:
    """Let caches that are keyed by a mesh know this thread's from another's, as torch does for its own threads."""
    make = DeviceMesh.__init__

    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._thread_id, self._hash = threading.get_ident(), None

    with swapped(DeviceMesh, "__init__", init):
        yield
