"""`replicated_in_region()`: a module with full parameters on every rank inside a region, such as a norm over each head."""

from torch import nn
from torch.distributed.tensor import Partial, Replicate

from titanplans.split.layout import Layout
from titanplans.split.root_mean_square import EPSILONS
from titanplans.split.state import specialise
from titanplans.split.tokens.projections import is_product, on_local_tokens
from titanplans.styles.base import Operands, ParameterStyle, Site, SplitOver


class ReplicatedInRegion(ParameterStyle):
    """Replicate a module's parameters inside a region.

        forward   y = norm(x of this rank's heads): nothing is sent
        backward  dw is partial: each rank's gradient covers only its heads

    For modules between the region's entry and its `rowwise()`. A module after the `rowwise()` is on the stream again, and
    needs `replicated_on_stream()`.
    """

    is_inside_region = True
    remedy = "a norm over a width that is split needs split_norm() or gathered_in_region()"

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return Layout(Replicate(), Partial())

    def operands(self, degree: int) -> Operands | None:
        return Operands(replicas=degree)

    def by_tokens(self, module: nn.Module, site: Site) -> None:
        """In a mixer, make a token-wise module accept a `ShardedSequence` and work on its local tokens."""
        if site.exchanges_tokens and (is_product(module) or any(hasattr(module, name) for name in EPSILONS)):
            specialise(module, on_local_tokens(type(module)))
