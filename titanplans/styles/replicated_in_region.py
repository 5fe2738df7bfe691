"""`replicated_in_region()`: what every rank has in full inside a region, such as a norm over each head."""

from torch import nn
from torch.distributed.tensor import Partial, Replicate

from titanplans.split.layout import Layout
from titanplans.split.root_mean_square import EPSILONS
from titanplans.split.state import specialise
from titanplans.split.tokens.products import is_product, of_each_token
from titanplans.styles.base import Operands, ParameterStyle, Site, SplitOver


class ReplicatedInRegion(ParameterStyle):
    """Replicate a module's parameters inside a region.

        forward   y = norm(x of this rank's heads): nothing is sent
        backward  dw is partial: this rank's heads alone have contributed

    For modules between the region's entry and its `rowwise()`. A module that works on the sum, after the `rowwise()`, is on
    the stream again: `replicated_on_stream()`.
    """

    inside = True
    remedy = "a norm over a width that is split is split_norm() or gathered_in_region()"

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return Layout(Replicate(), Partial())

    def operands(self, degree: int) -> Operands | None:
        return Operands(sharing=degree)

    def by_tokens(self, module: nn.Module, site: Site) -> None:
        """In a mixer a token-wise module works on this rank's tokens of a sequence that looks complete."""
        if site.exchanges_tokens and (is_product(module) or any(hasattr(module, name) for name in EPSILONS)):
            specialise(module, of_each_token(type(module)))
