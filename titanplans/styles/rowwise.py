"""`rowwise()`: each rank multiplies its shard of the inputs, and the partial outputs are summed over the ranks."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.split.border import Border
from titanplans.split.layout import Layout
from titanplans.split.module_weight import add_deferred_bias
from titanplans.split.state import specialise
from titanplans.split.tokens.projections import is_product, to_tokens_before
from titanplans.styles.base import Operands, Site, SplitOver, Style


class Rowwise(Style):
    """Shard a Linear's inputs; its partial output [..., sequence, outputs] is reduced as it leaves the region.

        forward   y_BLD = x_BLf @ W_Df.T is partial: reduce-scatter over L (all-reduce without sequence parallelism)
        backward  dy_BLD: all-gather over L (nothing without sequence parallelism); dx_BLf = dy_BLD @ W_Df and
                  dW_Df = dy.T @ x_BLf are local, and nothing more is sent

    `layout` declares the placements of the parameters. `by_weights` installs the reduction. The weight needs no hook:
    `module.weight` already returns the local tensor (`split.module_weight`). With `reduce_output=False` a parent region
    reduces at its exit.

    A bias is replicated and added after the sum, as the unsplit Linear adds it. If a parent reduces, or the weight is
    transposed (GPT-2's Conv1D, whose forward accepts no None as its bias), each rank adds bias / degree instead.

    Args:
        reduce_output: reduce this module's output. False if the parent module reduces instead, because the parent passes
            this weight to a fused kernel, or uses the output before it returns.
        dim: the dimension of the weight that is sharded. 1: the inputs of a Linear's weight [outputs, inputs].
    """

    is_inside_region = splits_weights = makes_partial_sum = multiplies_local_tokens = True
    remedy = "colwise() is for a projection that gets the full input"

    def __init__(self, *, reduce_output: bool = True, dim: int = 1):
        self.reduce_output, self.dim = reduce_output, dim

    @property
    def closes(self) -> bool:  # type: ignore[override]
        return self.reduce_output

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        if name != "bias":
            return Layout(Shard(self.dim), Shard(self.dim))
        if self.reduce_output and self.dim == 1:
            return Layout(Replicate(), over.stream.gradient, deferred=True)
        return Layout(Replicate(), Partial(), divided_by=over.degree)

    def operands(self, degree: int) -> Operands | None:
        return Operands(inputs=True)

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        reason = "a single parameter has no output to reduce: use rowwise(reduce_output=False)"
        return reason if self.reduce_output else None

    def by_weights(self, module: nn.Module, site: Site) -> None:
        if self.reduce_output:
            module.register_forward_hook(partial(_leave, site.border, site.exchanges_tokens))

    def by_tokens(self, module: nn.Module, site: Site) -> None:
        """Install, before a mixer's product of local tokens, the all-to-all that exchanges heads for tokens."""
        self.by_weights(module, site)
        if site.exchanges_tokens and is_product(module):
            specialise(module, to_tokens_before(type(module)))


def _leave(
    border: Border, exchanges_tokens: bool, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    if exchanges_tokens and border.stream.runs_in_full:  # each CP rank has multiplied only its heads
        output = border.tokens.total(output)
    return add_deferred_bias(module, border.leave(output))
