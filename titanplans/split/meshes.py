"""The meshes over which a model is cut, out of one with dimensions called "cp" and "tp"."""

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from titanplans.torch_private.dtensor import flatten_mesh


class CutMeshes(NamedTuple):
    """The ranks that share a layer, a sequence, and the heads of a mixer."""

    tp: DeviceMesh | None
    """1-D; None: each rank has all weights."""
    cp: DeviceMesh | None
    """1-D; None: each rank has all tokens."""
    both: DeviceMesh
    """"tp", "cp" or ("cp", "tp")."""
    sharing: DeviceMesh
    """1-D: all of them, which work on the same batch."""


def meshes_of(mesh: DeviceMesh, sharing: DeviceMesh | None = None) -> CutMeshes:
    """Return the meshes of `mesh`, with dimensions "cp", "tp" or both; without names, 1-D, it is "tp".

    `sharing`: 1-D, of all its ranks; None to make one, which is collective if both dimensions are above 1.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if sizes.get("cp", 1) == 1:
        tp = mesh["tp"] if mesh.ndim > 1 else mesh
        return CutMeshes(tp, None, tp, tp)
    cp = mesh["cp"]
    if sizes.get("tp", 1) == 1:
        return CutMeshes(None, cp, cp, cp)
    both = mesh["cp", "tp"]
    return CutMeshes(mesh["tp"], cp, both, flatten_mesh(both, "heads") if sharing is None else sharing)
