"""The mesh over which experts are shared out, out of those of a job."""

from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh


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
