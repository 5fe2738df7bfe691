"""The ways to split a model by a plan: by weights; by tokens, together with weights or alone; by experts.

    by weights    tp ranks: each has a shard of heads, widths and vocabulary, and all tokens inside a region
    by tokens     cp ranks: each has its tokens; inside a mixer, all tokens for a shard of its TP rank's heads
    by experts    ep ranks: each has some of the experts; everything else is split in another way, or not at all

A pipeline stage is a model with fewer blocks, which is split in any of these ways (`split.stages`).
"""

from typing import Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanplans.errors import PlanError
from titanplans.plan.resolve import Entry, ResolvedPlan
from titanplans.split.border import Border
from titanplans.split.collectives import group_of
from titanplans.split.experts.dispatch import ExpertRanks
from titanplans.split.layout import Layout, StreamLayout, rows_used
from titanplans.split.local_code import HeadRanks
from titanplans.split.meshes import SplitMeshes
from titanplans.split.module_weight import MixerSlice, ParameterMemo, ParameterMesh, localize
from titanplans.split.state import make_state
from titanplans.split.tokens.exchange import RowAssignment, RowRanges, ranges_within, row_count
from titanplans.split.tokens.projections import HeadSplit, is_product
from titanplans.styles.base import Site, Style


class Way(Protocol):
    """A way to split: distributes the parameters of a plan's entries over a mesh, and installs their styles."""

    mesh: DeviceMesh
    """1-D: all tp x cp ranks, which work on the same batch."""
    distributes: bool
    """Parameters become DTensors."""
    sum_over_cp: bool
    """`align_gradients` sums the gradients over the CP ranks; False: FSDP2 or DDP does, over a mesh with the CP ranks."""
    ranks: HeadRanks
    """The ranks that the heads of a mixer are split over."""
    border: Border
    """The border between the residual stream and the regions."""

    def lay_out(self, entry: Entry) -> None:
        """Distribute the parameters of `entry`, so that its module's code gets local tensors."""
        ...

    def install(self, entry: Entry, border: Border) -> None:
        """Install the style of `entry` on its module, with `border` between the stream and the module."""
        ...


class ByWeights:
    """Split over the tensor-parallel ranks.

    Args:
        meshes: includes the tensor-parallel mesh.
        stream: the layout of the residual stream.
    """

    distributes = sum_over_cp = True

    def __init__(self, meshes: SplitMeshes, stream: StreamLayout):
        self.mesh, self.border = meshes.tp_cp, Border(meshes, stream)
        self.ranks = _tp_ranks(self.border)
        self._over, self._memo = ParameterMesh(meshes.tp), ParameterMemo()

    def lay_out(self, entry: Entry) -> None:
        localize(entry.module, self._over, entry.layouts, self._memo, self.border.group, self.border.rank)

    def install(self, entry: Entry, border: Border) -> None:
        entry.style.by_weights(entry.module, Site(border, self.ranks))


class ByTokens:
    """Split over the context-parallel ranks and, if there are any, the tensor-parallel ranks.

    The heads of a mixer are split over all tp x cp ranks, and its norms over a split width and its sums communicate over all
    of them. The slices of heads are ordered by TP rank and then by CP rank, so that the heads of a CP rank are a subset of
    its TP rank's heads.

    Args:
        plan: resolved.
        meshes: includes the context-parallel mesh and, if there is one, the tensor-parallel mesh.
        sum_over_cp: True: parameters become DTensors with gradients that are partial over "cp", and `align_gradients` sums
            them. False: FSDP2 or DDP sums the gradients, over a data-parallel mesh that includes the CP ranks.
    """

    def __init__(self, plan: ResolvedPlan, meshes: SplitMeshes, *, sum_over_cp: bool):
        self.plan, self.mesh = plan, meshes.tp_cp
        self.border = border = Border(meshes, plan.source.options.stream)
        self.tp, self.cp = border.group[1], border.tokens.ranks
        self.rank = border.rank * self.cp + border.tokens.rank
        # The slices of heads are ordered by TP rank and then by CP rank, but the ranks in the group by CP rank first.
        order = tuple(rank % self.cp * self.tp + rank // self.cp for rank in range(self.tp * self.cp))
        self.ranks = HeadRanks(self.rank, len(order), group_of(meshes.tp_cp), border, order)
        if sum_over_cp:
            self._over = ParameterMesh(meshes.both, replica_dims=1, has_layout_dim=meshes.tp is not None)
        else:
            self._over = ParameterMesh(meshes.tp)
        self.distributes, self.sum_over_cp = self._over.mesh is not None, sum_over_cp
        self._memo = ParameterMemo()

    def lay_out(self, entry: Entry) -> None:
        """Distribute the parameters of `entry` over TP ranks; inside a mixer its code gets this CP rank's slice."""
        layouts, in_mixer = dict(entry.layouts), self._is_in_mixer(entry)
        if self.border.mesh is None:  # one TP rank, so its local tensor has all rows
            defers = in_mixer and not entry.style.makes_partial_sum
            layouts = {
                name: layout._replace(rows=None, deferred=layout.deferred and defers)
                for name, layout in layouts.items()
            }
        slices = {}
        if in_mixer:
            by_name = {name: self._mixer_slice(entry, name) for name in layouts}
            slices = {name: part for name, part in by_name.items() if part is not None}
            if entry.style.multiplies_local_tokens and entry.parameter is None and is_product(entry.module):
                make_state(entry.module).heads = self._heads(entry)
        group, rank = self.border.group, self.border.rank
        localize(entry.module, self._over, layouts, self._memo, group, rank, slices)

    def install(self, entry: Entry, border: Border) -> None:
        in_mixer = self._is_in_mixer(entry)
        if not in_mixer and self._is_unsplit(entry.style):
            return
        ranks = self.ranks if in_mixer else _tp_ranks(border)
        entry.style.by_tokens(entry.module, Site(border, ranks, in_mixer))

    def _is_unsplit(self, style: Style) -> bool:
        """Whether a module outside of mixers needs no hooks, because no weight is split."""
        return self.border.mesh is None and (style.is_inside_region or (style.opens and not style.arguments))

    def _is_in_mixer(self, entry: Entry) -> bool:
        return self.plan.token_region_of(entry) is not None

    def _mixer_slice(self, entry: Entry, name: str) -> MixerSlice | None:
        """Return this rank's slice of a parameter's local tensor on its TP rank; None: all of it."""
        param, of_tp, of_heads = getattr(entry.module, name), entry.layouts[name], entry.head_layouts[name]
        divided_by = of_heads.divided_by // of_tp.divided_by
        if of_tp.deferred and self.border.mesh is None and entry.style.makes_partial_sum:
            divided_by = self.cp  # the module adds the bias itself; in a forward in full every CP rank does
        local_rows = _rows_of_rank(of_heads, param.shape, self.rank, self.tp * self.cp)
        if local_rows is None:
            return MixerSlice(0, (), divided_by) if divided_by > 1 else None
        dim, ranges = local_rows
        outer = _rows_of_rank(of_tp, param.shape, self.border.rank, self.tp)
        return MixerSlice(dim, self._within(entry, None if outer is None else outer[1], ranges), divided_by)

    def _heads(self, entry: Entry) -> HeadSplit:
        """Return how the outputs of a projection, or its inputs, are split over the CP ranks."""
        name = "weight" if "weight" in entry.layouts else "nf4_codes"
        shape = entry.module._parameters[name].shape  # type: ignore[union-attr]
        outer = _rows_of_rank(entry.layouts[name], shape, self.border.rank, self.tp)
        assert outer is not None
        # NF4 packs the values of two inputs into one byte, so a range of bytes covers twice as many inputs.
        factor = entry.module.in_features // shape[1] if name != "weight" and outer[0] == 1 else 1  # type: ignore[operator]
        ranges = []
        for cp_rank in range(self.cp):
            rank = self.border.rank * self.cp + cp_rank
            inner = _rows_of_rank(entry.head_layouts[name], shape, rank, self.tp * self.cp)
            assert inner is not None
            within = self._within(entry, outer[1], inner[1])
            ranges.append(tuple((factor * first, factor * size) for first, size in within))
        return HeadSplit(
            self.border, RowAssignment(tuple(ranges), factor * row_count(outer[1])), entry.style.closes
        )

    def _within(self, entry: Entry, outer: RowRanges | None, inner: RowRanges) -> RowRanges:
        try:
            return ranges_within(outer, inner)
        except ValueError as error:
            raise PlanError(
                f"over {self.tp} x {self.cp} ranks of tensor and context parallelism {error}",
                key=entry.key,
                style=entry.style,
                module=entry.module,
            ) from error


class ByExperts:
    """Split experts over the ranks of a mesh, and everything else in another way.

    Args:
        others: the way to split everything else.
        mesh: its last dimension has the ranks that the experts are distributed over: neighbouring ranks that include the TP
            ranks. A dimension before the last replicates the experts, whose gradients are then partial.
        capacity: an expert takes from each rank at most this factor times the rank's mean number of tokens per expert.
            None: no limit.

    Raises:
        PlanError: the TP ranks are not all in the last dimension of `mesh`.
    """

    def __init__(self, others: Way, mesh: DeviceMesh, capacity: float | None = None):
        self._others, self._mesh = others, mesh
        self.mesh, self.distributes, self.sum_over_cp = others.mesh, others.distributes, others.sum_over_cp
        self.ranks, self.border = others.ranks, others.border
        last = mesh.get_group(mesh.ndim - 1)
        self._group = (last.group_name, mesh.size(mesh.ndim - 1))
        self._rank = mesh.get_local_rank(mesh.ndim - 1)
        self._memo = ParameterMemo()
        tp = others.border.mesh
        layer_ranks = [dist.get_rank()] if tp is None else tp.mesh.flatten().tolist()
        expert_ranks = dist.get_process_group_ranks(last)
        if not set(layer_ranks) <= set(expert_ranks):
            raise PlanError(
                f"experts are distributed over ranks {expert_ranks}, which do not include all ranks that a layer is split "
                f"over, {layer_ranks}: choose a mesh whose 'ep' includes the ranks of 'tp'"
            )
        self._expert_ranks = ExpertRanks(self._group, len(layer_ranks), others.border.rank, capacity)
        self._has_only_tp_ranks = len(layer_ranks) == len(expert_ranks)

    def lay_out(self, entry: Entry) -> None:
        if not entry.style.splits_by_experts or self._has_only_tp_ranks:
            self._others.lay_out(entry)
            return
        over = ParameterMesh(self._mesh, replica_dims=self._mesh.ndim - 1)
        localize(entry.module, over, entry.layouts, self._memo, self._group, self._rank)

    def install(self, entry: Entry, border: Border) -> None:
        if entry.style.splits_by_experts:
            entry.style.by_experts(entry.module, self._expert_ranks)
        else:
            self._others.install(entry, border)


class NoSplit:
    """Leave modules and parameters unchanged. `alone`: a mesh of this rank only, which works on its own batch."""

    distributes, sum_over_cp = False, True

    def __init__(self, alone: DeviceMesh):
        self.mesh = alone
        self.border = Border(SplitMeshes(None, None, alone, alone), StreamLayout(sharded=False))
        self.ranks = HeadRanks(0, 1, (alone.get_group().group_name, 1), self.border, (0,))

    def lay_out(self, entry: Entry) -> None:
        """Do nothing: the parameters of `entry` stay plain tensors."""

    def install(self, entry: Entry, border: Border) -> None:
        """Do nothing."""


def _tp_ranks(border: Border) -> HeadRanks:
    degree = border.group[1]
    return HeadRanks(border.rank, degree, border.group, border, tuple(range(degree)))


def _rows_of_rank(
    layout: Layout, shape: tuple[int, ...], rank: int, degree: int
) -> tuple[int, RowRanges] | None:
    """Return a dimension of a parameter, and which of its rows `rank` of `degree` uses; None: all of them."""
    if (rows := rows_used(layout, shape, degree)) is None:
        return None
    return rows.dim, tuple((run.first_row(rank), run.row_count(rank)) for run in rows.runs)
