"""`colwise()`: each rank computes its shard of the outputs."""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from titanplans.split.convolution import check_groups
from titanplans.split.layout import Layout
from titanplans.split.state import specialise, subclass
from titanplans.split.tokens.projections import is_product, to_heads_after
from titanplans.styles.base import Operands, ParameterStyle, Site, SplitOver, direct_parameters


class Colwise(ParameterStyle):
    """Shard the outputs of a Linear, the channels of a depthwise convolution, or the heads of a parameter.

        forward   y_BLf = x_BLD @ W_fD.T, x replicated: nothing is sent
        backward  dx_BLD is partial, and the region's entry reduces it; dW_fD is sharded as W

    Args:
        dim: the dimension of the parameters that is sharded. 0: the outputs of a Linear. A parameter with fewer dimensions,
            such as the bias of a transposed weight, is sharded along its last dimension.
        interleaved: the weight is a packed projection in which each head's queries, keys and values are adjacent, so that
            even shards are correct.
    """

    is_inside_region = splits_weights = multiplies_local_tokens = slices_buffers = True
    remedy = "rowwise() is for a projection whose input is sharded"

    def __init__(self, *, dim: int = 0, interleaved: bool = False):
        self.dim, self.interleaved = dim, interleaved

    @property
    def ignores_sections(self) -> bool:  # type: ignore[override]
        return not self.interleaved

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        dim = min(self.dim, param.ndim - 1)
        return Layout(Shard(dim), Shard(dim))

    def operands(self, degree: int) -> Operands | None:
        return Operands(outputs=True)

    def by_weights(self, module: nn.Module, site: Site) -> None:
        if type(module).forward is nn.Linear.forward and "bias" in direct_parameters(module):
            specialise(module, _with_bias_apart(type(module)))
        check_groups(module, self)

    def by_tokens(self, module: nn.Module, site: Site) -> None:
        """Install, after a mixer's product of local tokens, the all-to-all that exchanges tokens for heads."""
        if not site.exchanges_tokens:
            self.by_weights(module, site)
            return
        if is_product(module):
            specialise(module, to_heads_after(type(module)))
        check_groups(module, self)


@cache
def _with_bias_apart(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass a Linear so that a compiled graph has a product and a separate addition of the bias.

    Inductor's pass for async tensor parallelism fuses an all-gather only with `mm`, not with `addmm`.
    """

    def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return nn.functional.linear(input, module.weight) + module.bias
        return nn.functional.linear(input, module.weight, module.bias)

    return subclass(cls, {"forward": forward}, "bias_apart")
