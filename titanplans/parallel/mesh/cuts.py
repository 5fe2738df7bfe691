"""The meshes over which a model is cut by weights and tokens, by experts, and sharded by FSDP."""

from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from titanplans.parallel.mesh.mesh import Mesh
from titanplans.split.meshes import SplitMeshes, meshes_of
from titanplans.torch_private.dtensor import concatenate_meshes, flatten_mesh


def meshes_to_cut(mesh: Any) -> SplitMeshes | None:
    """Return the meshes of tensor and context parallelism of `mesh`; None where both degrees are 1.

    Args:
        mesh: a `Mesh`, or torchtitan's ParallelDims, where the first call is collective if both are above 1.
    """
    names = [name for name in ("cp", "tp") if getattr(mesh, name) > 1]
    if not names:
        return None
    heads = mesh.get_mesh("heads") if len(names) > 1 and isinstance(mesh, Mesh) else None
    return meshes_of(mesh.get_mesh(names if len(names) > 1 else names[0]), heads)


class ExpertMeshes(NamedTuple):
    """Neighbouring ranks, those of a layer and then those of a sequence and of data, that hold the experts between them."""

    sharing: DeviceMesh
    """1-D, "ep"."""
    fsdp: DeviceMesh
    """The ranks that hold the same experts, over which FSDP shards them: "efsdp", behind "dp_replicate" under HSDP."""


def meshes_of_experts(mesh: Any) -> ExpertMeshes | None:
    """Return the meshes of expert parallelism of `mesh`, a `Mesh` or torchtitan's ParallelDims; None where there is none."""
    if mesh.ep == 1:
        return None
    names = ["dp_replicate", "efsdp"] if mesh.dp_replicate_enabled else ["efsdp"]
    return ExpertMeshes(mesh.get_mesh("ep"), mesh.get_mesh(names))


def fsdp_mesh(mesh: Any) -> DeviceMesh:
    """Return the mesh that FSDP shards over: that of `shard_mesh`, after "dp_replicate" where there are copies (HSDP)."""
    shards = shard_mesh(mesh)
    if not mesh.dp_replicate_enabled:
        return shards
    return concatenate_meshes([mesh.get_mesh("dp_replicate"), shards])


def shard_mesh(mesh: Any) -> DeviceMesh:
    """Return the 1-D mesh of the ranks that shard a copy of the weights, dp_shard x cp.

    Args:
        mesh: a `Mesh`, or torchtitan's ParallelDims, which calls it "fsdp" under one of its backends, and has none under
            its default: there "cp" is flattened into "dp_shard", for which the first call is collective.
    """
    if isinstance(mesh, Mesh) or mesh.spmd_backend == "partial_dtensor":
        return mesh.get_mesh("fsdp")
    return (
        mesh.get_mesh("dp_shard") if mesh.cp == 1 else flatten_mesh(mesh.get_mesh(["dp_shard", "cp"]), "fsdp")
    )
