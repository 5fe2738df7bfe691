"""The meshes that a model is split over, taken from one mesh with the dimensions "cp" and "tp"."""

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from titanplans.torch_private.dtensor import flatten_mesh


class SplitMeshes(NamedTuple):
    """The tensor-parallel and context-parallel meshes of a layer."""

    tp: DeviceMesh | None
    """1-D; None: each rank has all weights."""
    cp: DeviceMesh | None
    """1-D; None: each rank has all tokens."""
    both: DeviceMesh
    """The mesh of the dimensions that are above 1: ("tp",), ("cp",) or ("cp", "tp")."""
    tp_cp: DeviceMesh
    """1-D: all tp x cp ranks, which work on the same batch."""


def meshes_of(mesh: DeviceMesh, tp_cp: DeviceMesh | None = None) -> SplitMeshes:
    """Return the meshes of `mesh`, whose dimensions are "cp", "tp" or both; a 1-D mesh without names is "tp".

    Args:
        mesh: the mesh to take them from.
        tp_cp: 1-D, all ranks of `mesh`; None: it is created if both dimensions are above 1, which is collective.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if sizes.get("cp", 1) == 1:
        tp = mesh["tp"] if mesh.ndim > 1 else mesh
        return SplitMeshes(tp, None, tp, tp)
    cp = mesh["cp"]
    if sizes.get("tp", 1) == 1:
        return SplitMeshes(None, cp, cp, cp)
    both = mesh["cp", "tp"]
    return SplitMeshes(mesh["tp"], cp, both, flatten_mesh(both, "heads") if tp_cp is None else tp_cp)
