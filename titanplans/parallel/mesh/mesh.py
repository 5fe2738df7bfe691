"""The processes as a mesh of five axes, those of size 1 included, and combinations of axes.

    axis           size                         flattened   combines
    pp             pipeline stages              dp          dp_replicate x dp_shard: the ranks that read different data
    dp_replicate   copies of the model          fsdp        dp_shard x cp: the ranks that shard parameters
    dp_shard       shards of a copy             dp_cp       dp_replicate x dp_shard x cp: the ranks that sum the loss
    cp             parts of a sequence          heads       cp x tp: the ranks that share a mixer's heads
    tp             parts of a layer

and, with expert parallelism, the same processes in another order of axes: pp, dp_replicate,

    efsdp          ranks that hold the same experts, over which FSDP shards them
    ep             ranks that share the experts: neighbours, so that efsdp x ep = dp_shard x cp x tp

All are slices of one root mesh, so that FSDP and tensor parallelism can combine theirs. Communicators cost memory,
so none is made twice: all axes of size 1 share one; a combination in which only one axis is longer than 1 is that
axis itself, under its own name; and dp_cp is dp or fsdp where it holds the same ranks.

Which degrees are possible is in degrees.py, the process group itself in process_group.py.
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
"""What torchtitan's ParallelDims calls them."""


class Mesh:
    """The meshes of this process, read like torchtitan's ParallelDims: degrees as attributes, meshes by name.

    Building one is collective: every process of the group does so, with the same degrees, and in the
    same order as other groups and meshes.

    Args:
        degrees: at most one of them -1.
        device_type: "cpu", "cuda", …, what the meshes' tensors live on.

    Raises:
        ParallelError: no process group is up, or the degrees don't fit its size.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    """1: all ranks of a layer share the width of each expert."""

    dp_enabled: bool
    """Whether the size of this combination is above 1; so for every axis and combination."""
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
        self.world_mesh = _root(sizes, device_type)
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._of_experts = self._sparse(device_type) if degrees.ep > 1 else None
        self._combined = self._combine()  # now, not when first asked for: making a group is collective

    def get_mesh(self, names: str | Sequence[str]) -> DeviceMesh:
        """Return the mesh of one axis or combination, or of several, outermost first; of size 1 too.

        Args:
            names: "pp", "dp_replicate", "dp_shard", "cp", "tp", "dp" (or "batch"), "fsdp", "dp_cp" (or
                "loss"), "heads", or several of them that don't overlap.

        The same names give the same object each time.

        Raises:
            ParallelError: an unknown name, names that overlap, or not in the order of the axes.
        """
        key = tuple(_ALIASES.get(name, name) for name in ([names] if isinstance(names, str) else names))
        if self._of_experts is not None and key[-1:] in (("ep",), ("efsdp",)):
            return self._of_experts[key]
        if key not in self._meshes:
            self._check(key)
            single = [self._combined.get(name) or self.world_mesh[name] for name in key]
            axes = tuple(name for mesh in single for name in mesh.mesh_dim_names or ())
            sliced = set(axes) <= set(self.degrees.as_sizes())
            self._meshes[key] = self.world_mesh[axes] if sliced else concatenate_meshes(single)
        return self._meshes[key]

    def get_optional_mesh(self, names: str | Sequence[str]) -> DeviceMesh | None:
        """Return the mesh as `get_mesh` does; None if one of `names` has size 1 and is not "fsdp".

        "fsdp" is always there, as in torchtitan: at size 1 FSDP still gives mixed precision.
        """
        names = [names] if isinstance(names, str) else list(names)
        there = [name == "fsdp" or self.get_mesh(name).size() > 1 for name in names]
        return self.get_mesh(names) if all(there) else None

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that work on the same batch, as torchtitan calls it."""
        return self.cp * self.tp * self.pp

    def set_timeout(self, timeout: timedelta) -> None:
        """Give the groups of all meshes, and the default group, this timeout."""
        experts = [] if self._of_experts is None else [self._of_experts]
        for mesh in (self.world_mesh, *self._combined.values(), *experts):
            for group in mesh.get_all_groups():
                set_group_timeout(timeout, group)
        set_group_timeout(timeout, None)

    def _sparse(self, device_type: str) -> DeviceMesh:
        """Return the mesh of the axes of experts."""
        d = self.degrees
        sizes = {"pp": d.pp, "dp_replicate": d.dp_replicate}
        return _root(sizes | {"efsdp": d.dp_shard * d.cp * d.tp // d.ep, "ep": d.ep}, device_type)

    def _combine(self) -> dict[str, DeviceMesh]:
        made: dict[tuple[str, ...], DeviceMesh] = {}
        combined = {}
        for name, axes in _COMBINED.items():
            alone = "dp_shard" if "dp_shard" in axes else axes[0]
            long = tuple(axis for axis in axes if getattr(self, axis) > 1) or (alone,)
            if long not in made:
                made[long] = (
                    self.world_mesh[long] if len(long) == 1 else flatten_mesh(self.world_mesh[long], name)
                )
                _copy_timeout(made[long])
            combined[name] = made[long]
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


def _root(sizes: dict[str, int], device_type: str) -> DeviceMesh:
    """Return the mesh of all five axes, whose groups of one rank are one group."""
    long = {name: size for name, size in sizes.items() if size > 1}
    groups: dict[str, Any] = {}
    if long:
        mesh = init_device_mesh(device_type, tuple(long.values()), mesh_dim_names=tuple(long))
        _copy_timeout(mesh)
        groups = {name: mesh.get_group(name) for name in long}
    if len(long) < len(sizes):
        alone = _group_of_one()
        groups |= {name: alone for name in sizes if name not in long}
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
    """Return a group of this rank alone, without the world's other ranks making theirs here too."""
    default = dist.group.WORLD
    assert default is not None  # `Mesh` has seen to it
    if default.size() == 1:
        return default
    if default.bound_device_id is None:
        return cast(dist.ProcessGroup, dist.new_group([dist.get_rank()], use_local_synchronization=True))
    # NCCL splits a communicator then, in which all ranks have to take part.
    return cast(dist.ProcessGroup, dist.split_group(split_ranks=[[rank] for rank in range(default.size())]))


def _copy_timeout(mesh: DeviceMesh) -> None:
    """Give the groups of `mesh` the default group's timeout: torch gives them its own."""
    timeout = default_timeout(mesh.device_type)
    if timeout is not None:
        for group in mesh.get_all_groups():
            set_group_timeout(timeout, group)
