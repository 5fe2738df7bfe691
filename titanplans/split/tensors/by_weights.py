"""The cut by weights: a rank holds its heads' weights, its width's, its vocabulary's, and a region's whole sequence."""

from collections.abc import Mapping

from torch import nn

from titanplans.plan.layout import StreamLayout
from titanplans.plan.resolve import Entry
from titanplans.plan.styles.base import Style
from titanplans.plan.styles.norms import GatheredInRegion, SplitNorm
from titanplans.plan.styles.projections import Colwise, Rowwise, RowwiseInRegion
from titanplans.plan.styles.region import Region
from titanplans.plan.styles.replicated import EndOfStream, ReplicatedOnStream, Whole
from titanplans.plan.styles.vocab import VocabEmbedding, VocabHead
from titanplans.split.costs import Call, ExpectedCollective
from titanplans.split.local_code import HeadRanks
from titanplans.split.meshes import CutMeshes
from titanplans.split.parameters.local_parameters import ParameterMemo, ParameterMesh, localize
from titanplans.split.stream import Border
from titanplans.split.tensors.borders import END_OF_STREAM, ON_STREAM, REGION, WHOLE
from titanplans.split.tensors.norms import GATHERED, SPLIT_NORM
from titanplans.split.tensors.projections import COLWISE, ROWWISE, ROWWISE_IN_REGION
from titanplans.split.tensors.rules import Rule, Site
from titanplans.split.tensors.vocab import EMBEDDING, HEAD

RULES: dict[type[Style], Rule] = {
    Region: REGION,
    Colwise: COLWISE,
    Rowwise: ROWWISE,
    RowwiseInRegion: ROWWISE_IN_REGION,
    SplitNorm: SPLIT_NORM,
    GatheredInRegion: GATHERED,
    ReplicatedOnStream: ON_STREAM,
    Whole: WHOLE,
    EndOfStream: END_OF_STREAM,
    VocabEmbedding: EMBEDDING,
    VocabHead: HEAD,
}
"""By style; a subclass has the rule of its nearest base. A style without a rule only lays parameters out."""


class CutByWeights:
    """Cuts the modules of one model over a 1-D mesh, as its plan's styles declare.

    Args:
        meshes: that of tensor parallelism.
        stream: how the residual stream lies.
    """

    distributes = sum_over_cp = True

    def __init__(self, meshes: CutMeshes, stream: StreamLayout):
        self.mesh, self.border = meshes.sharing, Border(meshes, stream)
        self.ranks = ranks_of_weights(self.border)
        self._over, self._memo = ParameterMesh(meshes.tp), ParameterMemo()

    def lay_out(self, entry: Entry) -> None:
        """Distribute the parameters of `entry`; its module then reads their local tensors."""
        localize(entry.module, self._over, entry.layouts, self._memo, self.border.group, self.border.rank)

    def install(self, entry: Entry, border: Border) -> None:
        """Put the hooks of the style of `entry` on its module, at `border`."""
        rule_of(entry.style).install(entry.style, entry.module, Site(border, self.ranks))


def ranks_of_weights(border: Border) -> HeadRanks:
    """Return the ranks that share a layer's weights."""
    degree = border.group[1]
    return HeadRanks(border.rank, degree, border.group, border, tuple(range(degree)))


def rule_of(style: Style, rules: Mapping[type[Style], Rule] = RULES) -> Rule:
    """Return the rule of `style`: that of its nearest base."""
    return next((rules[cls] for cls in type(style).__mro__ if cls in rules), Rule())


def expected_collectives(style: Style, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
    """Return the collectives of a call of `module`, which has `style` (see `rules.Expect`)."""
    rule = rule_of(style)
    return () if rule.expect is None else rule.expect(style, module, call)
