"""Context parallelism by all-to-all, the cut by tokens, on top of the one by weights: tp x cp ranks share a mixer's heads.

    ranks of      have                                                          splits
    tp            their share of heads and widths                               whatever the cut by weights splits
    cp            their tokens; inside a mixer all tokens, of a share of the    mixers, embeddings, the head and its loss
                  heads of their tp rank

Inside a mixer, head counts, rows, split norms and sums are over all tp x cp ranks, numbered tp first: a cp rank's heads are
a subset of its tp rank's.
"""

from titanplans.errors import PlanError
from titanplans.plan.layout import Layout, rows_read
from titanplans.plan.resolve import Entry, ResolvedPlan
from titanplans.plan.styles.base import Style
from titanplans.plan.styles.projections import Colwise, Rowwise
from titanplans.plan.styles.region import Region
from titanplans.plan.styles.replicated import EndOfStream, ReplicatedInRegion
from titanplans.plan.styles.vocab import VocabEmbedding
from titanplans.split.local_code import HeadRanks
from titanplans.split.meshes import CutMeshes
from titanplans.split.parameters.local_parameters import ParameterMemo, ParameterMesh, localize
from titanplans.split.parameters.local_read import MixerPart
from titanplans.split.raw_collectives import group_of
from titanplans.split.state import make_state
from titanplans.split.stream import Border
from titanplans.split.tensors.by_weights import RULES, ranks_of_weights, rule_of
from titanplans.split.tensors.rules import Rule, Site
from titanplans.split.tokens.borders import EMBEDDING_OF_OWN, END_OF_STREAM, REGION
from titanplans.split.tokens.exchange import RowRanges, Share, number_of, ranges_within
from titanplans.split.tokens.products import BY_INPUTS, BY_OUTPUTS, OF_EACH_TOKEN, Heads, is_product

ON_STREAM: dict[type[Style], Rule] = {EndOfStream: END_OF_STREAM, VocabEmbedding: EMBEDDING_OF_OWN}
IN_MIXERS: dict[type[Style], Rule] = {
    Region: REGION,
    Colwise: BY_OUTPUTS,
    Rowwise: BY_INPUTS,
    ReplicatedInRegion: OF_EACH_TOKEN,
}
"""By style, on the stream and in mixers: where the rule is another than that by weights."""


class CutByTokens:
    """Cuts the modules of one model over ranks of context and of tensor parallelism, as its plan's styles declare.

    Args:
        plan: resolved for the ranks of tensor parallelism.
        in_mixers: the same plan, for all ranks that share the heads of a mixer.
        meshes: of both.
        sum_over_cp: parameters become DTensors whose gradients are Partial over cp, which `align_gradients` reduces;
            False: the mesh of data parallelism includes these ranks, and reduces.
    """

    def __init__(self, plan: ResolvedPlan, in_mixers: ResolvedPlan, meshes: CutMeshes, *, sum_over_cp: bool):
        self.plan, self.in_mixers = plan, in_mixers
        self.mesh = meshes.sharing
        self.border = border = Border(meshes, plan.source.options.stream)
        self.tp, self.cp = border.group[1], border.tokens.ranks
        self.rank = border.rank * self.cp + border.tokens.rank
        # By number, tp first, the rank in the group, in which cp comes first.
        order = tuple(rank % self.cp * self.tp + rank // self.cp for rank in range(self.tp * self.cp))
        self.ranks = HeadRanks(self.rank, len(order), group_of(meshes.sharing), border, order)
        if sum_over_cp:
            self._over = ParameterMesh(meshes.both, copies=1, cut=meshes.tp is not None)
        else:
            self._over = ParameterMesh(meshes.tp)
        self.distributes, self.sum_over_cp = self._over.mesh is not None, sum_over_cp
        self._memo = ParameterMemo()

    def lay_out(self, entry: Entry) -> None:
        """Distribute the parameters of `entry`; inside a mixer its module reads this rank's slice."""
        layouts = dict(entry.layouts)
        if self.border.mesh is None:  # one rank has all rows
            defers = not isinstance(entry.style, Rowwise) and self._is_inside(entry)
            layouts = {
                name: layout._replace(rows=None, deferred=layout.deferred and defers)
                for name, layout in layouts.items()
            }
        parts = {}
        if self._is_inside(entry):
            inner = self.in_mixers.by_key[entry.key]
            found = {name: self._part(entry, name, inner.layouts[name]) for name in layouts}
            parts = {name: part for name, part in found.items() if part is not None}
            if (
                isinstance(entry.style, Colwise | Rowwise)
                and entry.parameter is None
                and is_product(entry.module)
            ):
                make_state(entry.module).heads = self._heads(entry)
        group, rank = self.border.group, self.border.rank
        localize(entry.module, self._over, layouts, self._memo, group, rank, parts)

    def install(self, entry: Entry, border: Border) -> None:
        """Put the hooks of the style of `entry` on its module, at `border`."""
        inside = self._is_inside(entry)
        style, ranks = entry.style, ranks_of_weights(border)
        if inside:
            style, ranks = self.in_mixers.by_key[entry.key].style, self.ranks
        elif self._is_whole(style):
            return
        rules = RULES | IN_MIXERS if inside else RULES | ON_STREAM
        rule_of(style, rules).install(style, entry.module, Site(border, ranks))

    def _is_whole(self, style: Style) -> bool:
        """Whether a module outside of the mixers needs no hooks, since no weight is split."""
        opens = isinstance(style, Region) and not style.arguments
        return self.border.mesh is None and (style.inside or opens)

    def _is_inside(self, entry: Entry) -> bool:
        return self.plan.token_region_of(entry) is not None

    def _part(self, entry: Entry, name: str, inner: Layout) -> MixerPart | None:
        """Return which part of its tp rank's shard of a parameter this rank reads."""
        param, outer = getattr(entry.module, name), entry.layouts[name]
        divided_by = inner.divided_by // outer.divided_by
        held = _held(inner, param.shape, self.rank, self.tp * self.cp)
        if held is None:
            return MixerPart(0, (), divided_by) if divided_by > 1 else None
        dim, rows = held
        of_tp = _held(outer, param.shape, self.border.rank, self.tp)
        return MixerPart(dim, self._within(entry, None if of_tp is None else of_tp[1], rows), divided_by)

    def _heads(self, entry: Entry) -> Heads:
        """Return how the outputs of a projection, or its inputs, are divided over the cp ranks."""
        name = "weight" if "weight" in entry.layouts else "nf4_codes"
        outer, inner = entry.layouts[name], self.in_mixers.by_key[entry.key].layouts[name]
        shape = entry.module._parameters[name].shape  # type: ignore[union-attr]
        of_tp = _held(outer, shape, self.border.rank, self.tp)
        assert of_tp is not None
        # NF4 packs two inputs into a code.
        wide = entry.module.in_features // shape[1] if name != "weight" and of_tp[0] == 1 else 1  # type: ignore[operator]
        ranges = []
        for rank in range(self.cp):
            held = _held(inner, shape, self.border.rank * self.cp + rank, self.tp * self.cp)
            assert held is not None
            within = self._within(entry, of_tp[1], held[1])
            ranges.append(tuple((wide * first, wide * size) for first, size in within))
        closes = isinstance(entry.style, Rowwise) and entry.style.closes
        return Heads(self.border, Share(tuple(ranges), wide * number_of(of_tp[1])), closes)

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


def _held(layout: Layout, shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, RowRanges] | None:
    """Return the dimension and the rows of a parameter that `rank` uses; None for all."""
    if (rows := rows_read(layout, shape, ranks)) is None:
        return None
    return rows.dim, tuple((run.at(rank), run.of(rank)) for run in rows.runs)
