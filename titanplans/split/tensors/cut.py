"""The cut by weights: a rank holds its heads' weights, its width's, its vocabulary's, and a region's whole sequence."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanplans.plan.layout import StreamLayout
from titanplans.plan.resolve import Entry
from titanplans.plan.styles.base import Style
from titanplans.plan.styles.norms import GatheredInRegion, SplitNorm
from titanplans.plan.styles.projections import Colwise, Rowwise, RowwiseInRegion
from titanplans.plan.styles.region import Region
from titanplans.plan.styles.replicated import EndOfStream, ReplicatedOnStream, Whole
from titanplans.plan.styles.vocab import VocabEmbedding, VocabHead
from titanplans.split.costs import Call, ExpectedCollective
from titanplans.split.local_code import PlaceInGroup
from titanplans.split.parameters.local_parameters import ParameterMemo, Placing, localize
from titanplans.split.stream import Border, Stream
from titanplans.split.tensors.norms import GATHERED, SPLIT_NORM
from titanplans.split.tensors.projections import COLWISE, ROWWISE, ROWWISE_IN_REGION
from titanplans.split.tensors.region import REGION
from titanplans.split.tensors.replicated import END_OF_STREAM, ON_STREAM, WHOLE
from titanplans.split.tensors.rules import Rule
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
        mesh: the 1-D mesh of tensor parallelism.
        stream: how the residual stream lies.
    """

    distributes = sums = True

    def __init__(self, mesh: DeviceMesh, stream: StreamLayout):
        self.mesh, self.border = mesh, Border(mesh, Stream(stream))
        self.place = PlaceInGroup(self.border.rank, mesh.size(), self.border.group)
        self._placing, self._memo = Placing(mesh), ParameterMemo()

    def lay_out(self, entry: Entry) -> None:
        """Distribute the parameters of `entry`; its module then reads their local tensors."""
        localize(entry.module, self._placing, entry.layouts, self._memo, self.border.group, self.border.rank)

    def install(self, entry: Entry, border: Border) -> None:
        """Put the hooks of the style of `entry` on its module, at `border`."""
        install = rule_of(entry.style).install
        if install is not None:
            install(entry.style, entry.module, border)


def rule_of(style: Style) -> Rule:
    """Return how `style` is cut by weights."""
    return next((RULES[cls] for cls in type(style).__mro__ if cls in RULES), Rule())


def expected_collectives(style: Style, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
    """Return the collectives of a call of `module`, which has `style` (see `rules.Expect`)."""
    rule = rule_of(style)
    return () if rule.expect is None else rule.expect(style, module, call)
