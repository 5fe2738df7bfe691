"""The meshes of context and tensor parallelism, out of one with dimensions called "cp" and "tp"."""

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from titanplans.torch_private.dtensor import flatten_mesh


class ContextMeshes(NamedTuple):
    """The ranks that share a sequence, a layer, and the heads of a mixer."""

    cp: DeviceMesh
    tp: DeviceMesh | None
    """None: nothing is cut by weights."""
    both: DeviceMesh
    """"cp", or "cp" and "tp"."""
    heads: DeviceMesh
    """1-D: all of them."""


def context_meshes(mesh: DeviceMesh, heads: DeviceMesh | None = None) -> ContextMeshes:
    """Return the meshes of `mesh`, which has a dimension "cp" and perhaps one "tp".

    `heads`: 1-D, of all its ranks; None to make one, which is collective if both dimensions are above 1.
    """
    cp = mesh["cp"]
    if "tp" not in (mesh.mesh_dim_names or ()) or mesh["tp"].size() == 1:
        return ContextMeshes(cp, None, cp, cp)
    both = mesh["cp", "tp"]
    return ContextMeshes(cp, mesh["tp"], both, flatten_mesh(both, "heads") if heads is None else heads)
