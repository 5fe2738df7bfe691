"""The cut by experts, over ranks that include those of tensor parallelism; all else is another cut's, or is not cut."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanplans.errors import PlanError
from titanplans.plan.layout import StreamLayout
from titanplans.plan.resolve import Entry
from titanplans.plan.styles.experts import ByExpert
from titanplans.split.cut import Cut
from titanplans.split.experts.dispatch import ExpertRanks, install_dispatch
from titanplans.split.local_code import HeadRanks
from titanplans.split.meshes import CutMeshes
from titanplans.split.parameters.local_parameters import ParameterMemo, ParameterMesh, localize
from titanplans.split.stream import Border


class CutByExperts:
    """Gives experts to the ranks of a mesh, and leaves all else to another cut.

    Args:
        others: the cut of everything else.
        mesh: its last dimension is of the ranks that share experts, neighbours, those of tensor parallelism among them; one
            before it, if there is, has copies of the experts, whose gradients are parts.
        capacity: an expert takes at most so many times the mean of the pairs that a rank sends; None: all.

    Raises:
        PlanError: the ranks of tensor parallelism are not among those that share experts.
    """

    def __init__(self, others: Cut, mesh: DeviceMesh, capacity: float | None = None):
        self._others, self._mesh = others, mesh
        self.mesh, self.distributes, self.sum_over_cp = others.mesh, others.distributes, others.sum_over_cp
        self.ranks, self.border = others.ranks, others.border
        last = mesh.get_group(mesh.ndim - 1)
        self._group = (last.group_name, mesh.size(mesh.ndim - 1))
        self._rank = mesh.get_local_rank(mesh.ndim - 1)
        self._memo = ParameterMemo()
        tp = others.border.mesh
        of_layer = [dist.get_rank()] if tp is None else tp.mesh.flatten().tolist()
        sharing = dist.get_process_group_ranks(last)
        if not set(of_layer) <= set(sharing):
            raise PlanError(
                f"ranks {sharing} share experts, and ranks {of_layer} a layer: the latter have to be among the former"
            )
        self._expert_ranks = ExpertRanks(self._group, len(of_layer), others.border.rank, capacity)
        self._with_layers = len(of_layer) == len(sharing)

    def lay_out(self, entry: Entry) -> None:
        """Distribute the parameters of `entry`; experts over the mesh of experts."""
        if not isinstance(entry.style, ByExpert) or self._with_layers:
            self._others.lay_out(entry)
            return
        over = ParameterMesh(self._mesh, copies=self._mesh.ndim - 1)
        localize(entry.module, over, entry.layouts, self._memo, self._group, self._rank)

    def install(self, entry: Entry, border: Border) -> None:
        """Put the hooks of the style of `entry` on its module, at `border`."""
        if isinstance(entry.style, ByExpert):
            install_dispatch(entry.module, self._expert_ranks)
        else:
            self._others.install(entry, border)


class Untouched:
    """Leaves modules and parameters as they are. `alone`: a mesh of this rank, which alone works on its batch."""

    distributes, sum_over_cp = False, True

    def __init__(self, alone: DeviceMesh):
        self.mesh = alone
        self.border = Border(CutMeshes(None, None, alone, alone), StreamLayout(sharded=False))
        self.ranks = HeadRanks(0, 1, (alone.get_group().group_name, 1), self.border, (0,))

    def lay_out(self, entry: Entry) -> None:
        """Leave the parameters of `entry` plain."""

    def install(self, entry: Entry, border: Border) -> None:
        """Put no hooks on its module."""
