"""The meshes over which a model is cut by weights and tokens, out of those of a job."""

from typing import Any

from titanplans.parallel.mesh.mesh import Mesh
from titanplans.split.meshes import CutMeshes, meshes_of


def meshes_to_cut(mesh: Any) -> CutMeshes | None:
    """Return the meshes of tensor and context parallelism of `mesh`; None where both degrees are 1.

    Args:
        mesh: a `Mesh`, or torchtitan's ParallelDims, where the first call is collective if both are above 1.
    """
    names = [name for name in ("cp", "tp") if getattr(mesh, name) > 1]
    if not names:
        return None
    heads = mesh.get_mesh("heads") if len(names) > 1 and isinstance(mesh, Mesh) else None
    return meshes_of(mesh.get_mesh(names if len(names) > 1 else names[0]), heads)
