"""`Mesh`: all ranks as a mesh of five axes, including those of size 1, and flattened combinations of axes.

    axis           size                         flattened   combines
    pp             pipeline stages              dp          dp_replicate x dp_shard: the ranks that read different data
    dp_replicate   replicas of the model        fsdp        dp_shard x cp: the ranks that shard parameters
    dp_shard       shards of a replica          dp_cp       dp_replicate x dp_shard x cp: the ranks that sum the loss
    cp             shards of a sequence         heads       cp x tp: the ranks that a mixer's heads are split over
    tp             shards of a layer

With expert parallelism a second mesh arranges the same ranks along pp, dp_replicate and

    efsdp          ranks that hold the same experts, over which FSDP shards them
    ep             neighbouring ranks that experts are distributed over; efsdp x ep = dp_shard x cp x tp
"""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanplans.errors import ParallelError
from titanplans.plan.degrees import Degrees
from titanplans.torch_private.distributed import default_timeout, set_group_timeout
from titanplans.torch_private.dtensor import concatenate_meshes, flatten_mesh

_COMBINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "heads": ("cp", "tp"),
}
_ALIASES = {"batch": "dp", "loss": "dp_cp"}
"""Names that torchtitan's ParallelDims has for these meshes."""


class Mesh:
    """All device meshes of a job, with the interface of torchtitan's ParallelDims: degrees as attributes, meshes by name.

    Construction is collective: every rank constructs it with the same degrees, and in the same order relative to other
    groups and meshes. All meshes but those of expert parallelism are slices of one root mesh, so that FSDP2 can combine its
    mesh with the tensor-parallel mesh.

    Args:
        degrees: at most one of them may be -1; it is computed from the world size.
        device_type: "cpu", "cuda", ...: the device of the tensors that are communicated.

    Raises:
        ParallelError: no process group is initialized, or the degrees do not fit its size.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    """1: no expert parallelism; TP splits each expert's width."""

    dp_enabled: bool
    """Whether the size of this combination of axes is above 1; the same for the attributes below."""
    dp_replicate_enabled: bool
    dp_shard_enabled: bool
    fsdp_enabled: bool
    dp_cp_enabled: bool
    heads_enabled: bool
    cp_enabled: bool
    tp_enabled: bool
    pp_enabled: bool
    ep_enabled: bool

    def __init__(self, degrees: Degrees, device_type: str):
        if not dist.is_initialized():
            raise ParallelError("no process group is initialized: build the mesh inside process_group()")
        self.world_size = dist.get_world_size()
        self.degrees = degrees.resolve(self.world_size)
        self.degrees.refuse_experts()
        sizes = self.degrees.as_sizes()
        vars(self).update(sizes, ep=degrees.ep, ep_enabled=degrees.ep > 1)
        for name, axes in ({name: (name,) for name in sizes} | _COMBINED).items():
            setattr(self, f"{name}_enabled", math.prod(sizes[axis] for axis in axes) > 1)
        self.world_mesh = _root_mesh(sizes, device_type)
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._expert_mesh = self._make_expert_mesh(device_type) if degrees.ep > 1 else None
        self._combined = self._combine()  # now, not on first use: creating a group is collective

    def get_mesh(self, names: str | Sequence[str]) -> DeviceMesh:
        """Return the mesh of one axis or combination, or of several, outermost first; its size may be 1.

        The same names return the same object each time.

        Args:
            names: "pp", "dp_replicate", "dp_shard", "cp", "tp", "dp" (or "batch"), "fsdp", "dp_cp" (or "loss"), "heads", or
                several of them that don't overlap; with expert parallelism also those that end in "efsdp" or "ep".

        Raises:
            ParallelError: a name is unknown, names overlap, or they are not in the order of the axes.
        """
        key = tuple(_ALIASES.get(name, name) for name in ([names] if isinstance(names, str) else names))
        if self._expert_mesh is not None and key[-1:] in (("ep",), ("efsdp",)):
            return self._expert_mesh[key]
        if key not in self._meshes:
            self._check(key)
            single = [self._combined.get(name) or self.world_mesh[name] for name in key]
            axes = tuple(name for mesh in single for name in mesh.mesh_dim_names or ())
            is_slice = set(axes) <= set(self.degrees.as_sizes())
            self._meshes[key] = self.world_mesh[axes] if is_slice else concatenate_meshes(single)
        return self._meshes[key]

    def get_optional_mesh(self, names: str | Sequence[str]) -> DeviceMesh | None:
        """Return `get_mesh(names)`; None if one of `names`, other than "fsdp", has size 1.

        "fsdp" is always returned, as in torchtitan: FSDP over one rank still applies mixed precision.
        """
        names = [names] if isinstance(names, str) else list(names)
        exists = [name == "fsdp" or self.get_mesh(name).size() > 1 for name in names]
        return self.get_mesh(names) if all(exists) else None

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that work on the same batch; torchtitan's name."""
        return self.cp * self.tp * self.pp

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the groups of all meshes and of the default group."""
        experts = [] if self._expert_mesh is None else [self._expert_mesh]
        for mesh in (self.world_mesh, *self._combined.values(), *experts):
            for group in mesh.get_all_groups():
                set_group_timeout(timeout, group)
        set_group_timeout(timeout, None)

    def _make_expert_mesh(self, device_type: str) -> DeviceMesh:
        d = self.degrees
        sizes = {"pp": d.pp, "dp_replicate": d.dp_replicate}
        return _root_mesh(sizes | {"efsdp": d.dp_shard * d.cp * d.tp // d.ep, "ep": d.ep}, device_type)

    def _combine(self) -> dict[str, DeviceMesh]:
        """Return the mesh of each combination. The same ranks never get a second communicator, since communicators cost
        memory.

        A combination with at most one axis longer than 1 is the mesh of that axis, with the axis' name. If dp_cp has the
        same ranks as dp or fsdp, it is that mesh.
        """
        by_axes: dict[tuple[str, ...], DeviceMesh] = {}
        combined = {}
        for name, axes in _COMBINED.items():
            fallback = "dp_shard" if "dp_shard" in axes else axes[0]
            long = tuple(axis for axis in axes if getattr(self, axis) > 1) or (fallback,)
            if long not in by_axes:
                by_axes[long] = (
                    self.world_mesh[long] if len(long) == 1 else flatten_mesh(self.world_mesh[long], name)
                )
                _copy_timeout(by_axes[long])
            combined[name] = by_axes[long]
        return combined

    def _check(self, key: tuple[str, ...]) -> None:
        order = list(self.degrees.as_sizes())
        unknown = [name for name in key if name not in order and name not in _COMBINED]
        if unknown or not key:
            raise ParallelError(
                f"no mesh is called {unknown[0] if unknown else key!r}: there are {', '.join([*order, *_COMBINED])}"
            )
        axes = [order.index(axis) for name in key for axis in _COMBINED.get(name, (name,))]
        if axes != sorted(set(axes)):
            raise ParallelError(
                f"no mesh of {' and '.join(key)}: name dimensions in the order {', '.join(order)}, each at most once"
            )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.degrees.as_sizes().items())
        return f"Mesh({sizes}, {self.world_mesh.device_type!r})"


def _root_mesh(sizes: dict[str, int], device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks with axes of `sizes`; axes of size 1 share one group, since groups cost memory."""
    long = {name: size for name, size in sizes.items() if size > 1}
    groups: dict[str, Any] = {}
    if long:
        mesh = init_device_mesh(device_type, tuple(long.values()), mesh_dim_names=tuple(long))
        _copy_timeout(mesh)
        groups = {name: mesh.get_group(name) for name in long}
    if len(long) < len(sizes):
        group_of_one = _group_of_one()
        groups |= {name: group_of_one for name in sizes if name not in long}
    return DeviceMesh.from_group(
        [groups[name] for name in sizes],
        device_type,
        mesh=torch.arange(dist.get_world_size(), dtype=torch.int, device="cpu").view(*sizes.values()),
        mesh_dim_names=tuple(sizes),
    )


def mesh_of_one(device_type: str) -> DeviceMesh:
    """Return a mesh of this rank alone."""
    return DeviceMesh.from_group(_group_of_one(), device_type, mesh=torch.tensor([dist.get_rank()]))


def _group_of_one() -> dist.ProcessGroup:
    """Return a group of only this rank. Collective over all ranks if NCCL is bound to a device."""
    default = dist.group.WORLD
    assert default is not None  # `Mesh` has checked it
    if default.size() == 1:
        return default
    if default.bound_device_id is None:
        return cast(dist.ProcessGroup, dist.new_group([dist.get_rank()], use_local_synchronization=True))
    # If NCCL is bound to a device, it creates a group by splitting the communicator of all ranks, so all ranks must take
    # part.
    return cast(dist.ProcessGroup, dist.split_group(split_ranks=[[rank] for rank in range(default.size())]))


def _copy_timeout(mesh: DeviceMesh) -> None:
    """Set the default group's timeout on the groups of `mesh`: torch gives new groups its own default."""
    timeout = default_timeout(mesh.device_type)
    if timeout is not None:
        for group in mesh.get_all_groups():
            set_group_timeout(timeout, group)
