"""The meshes over which a model is cut by tokens, out of those of a job."""

from typing import Any

from titanplans.parallel.mesh.mesh import Mesh
from titanplans.split.tokens.meshes import ContextMeshes, context_meshes


def meshes_of_heads(mesh: Any) -> ContextMeshes | None:
    """Return the meshes of context parallelism of `mesh`; None where a rank has whole sequences.

    Args:
        mesh: a `Mesh`, or torchtitan's ParallelDims, where the first call is collective if cp and tp are above 1.
    """
    if mesh.cp == 1:
        return None
    both = mesh.get_mesh(["cp", "tp"] if mesh.tp > 1 else ["cp"])
    return context_meshes(both, mesh.get_mesh("heads") if isinstance(mesh, Mesh) else None)
