"""The meshes of tensor and context parallelism, of expert parallelism and of FSDP, from a `Mesh` or ParallelDims."""

from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from titanplans.parallel.mesh.mesh import Mesh
from titanplans.split.meshes import SplitMeshes, meshes_of
from titanplans.torch_private.dtensor import concatenate_meshes, flatten_mesh


def split_meshes(mesh: Any) -> SplitMeshes | None:
    """Return the meshes of tensor and context parallelism; None if both degrees are 1.

    Args:
        mesh: a `Mesh`, or torchtitan's ParallelDims. With the latter the first call is collective if both degrees are
            above 1.
    """
    names = [name for name in ("cp", "tp") if getattr(mesh, name) > 1]
    if not names:
        return None
    heads = mesh.get_mesh("heads") if len(names) > 1 and isinstance(mesh, Mesh) else None
    return meshes_of(mesh.get_mesh(names if len(names) > 1 else names[0]), heads)


class ExpertMeshes(NamedTuple):
    """The meshes of expert parallelism."""

    ep: DeviceMesh
    """1-D: the neighbouring ranks that experts are distributed over, taken from tp first, then from cp and dp_shard."""
    fsdp: DeviceMesh
    """The ranks that hold the same experts, over which FSDP shards them: "efsdp", after "dp_replicate" under HSDP."""


def expert_meshes(mesh: Any) -> ExpertMeshes | None:
    """Return the expert-parallel meshes of `mesh`, a `Mesh` or torchtitan's ParallelDims; None if its ep is 1."""
    if mesh.ep == 1:
        return None
    names = ["dp_replicate", "efsdp"] if mesh.dp_replicate_enabled else ["efsdp"]
    return ExpertMeshes(mesh.get_mesh("ep"), mesh.get_mesh(names))


def fsdp_mesh(mesh: Any) -> DeviceMesh:
    """Return the mesh of FSDP: `shard_mesh`, preceded by "dp_replicate" if its degree is above 1 (HSDP)."""
    shards = shard_mesh(mesh)
    if not mesh.dp_replicate_enabled:
        return shards
    return concatenate_meshes([mesh.get_mesh("dp_replicate"), shards])


def shard_mesh(mesh: Any) -> DeviceMesh:
    """Return the 1-D mesh over which FSDP shards one replica of the weights, dp_shard x cp.

    Args:
        mesh: a `Mesh`, or torchtitan's ParallelDims. ParallelDims has a mesh "fsdp" only with the backend
            "partial_dtensor"; with its default "dp_shard" and "cp" are flattened, and the first call is collective.
    """
    if isinstance(mesh, Mesh) or mesh.spmd_backend == "partial_dtensor":
        return mesh.get_mesh("fsdp")
    return (
        mesh.get_mesh("dp_shard") if mesh.cp == 1 else flatten_mesh(mesh.get_mesh(["dp_shard", "cp"]), "fsdp")
    )
