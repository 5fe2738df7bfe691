"""`rowwise_in_region()`: a projection inside a region whose summed output every rank needs."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.split.collectives import Group, sum_in_region
from titanplans.split.costs import Call, ExpectedCollective, cost_of_sum
from titanplans.split.layout import Layout
from titanplans.split.module_weight import add_deferred_bias
from titanplans.styles.base import Operands, Site, SplitOver, Style, direct_parameters


class RowwiseInRegion(Style):
    """Shard a Linear's inputs inside a region, and return the full output on every rank, inside the region.

        forward   y_BLR = x_BLf @ W_Rf.T is partial: all-reduce
        backward  dy_BLR is partial: all-reduce; dW_Rf is sharded as W

    For a small projection that every rank needs in full, such as Mamba's `x_proj`. If the mixer's code multiplies by the
    weight itself, the key names the weight (`x_proj.weight`). Then `TPPlan.local_functions` has to wrap the function that
    multiplies, so that it also sums over the ranks (`self.sum_over_ranks`).
    """

    is_inside_region = splits_weights = True
    listed_as = "summed inside"

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return Layout(Replicate(), Partial(), deferred=True) if name == "bias" else Layout(Shard(1), Shard(1))

    def operands(self, degree: int) -> Operands | None:
        return Operands(inputs=True)

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return "it is not a weight [outputs, inputs]: use replicated_in_region()" if param.ndim != 2 else None

    def by_weights(self, module: nn.Module, site: Site) -> None:
        module.register_forward_hook(partial(_sum, site.ranks.group))

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        return (cost_of_sum(call.tokens * len(direct_parameters(module)["weight"])),)


def _sum(group: Group, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return add_deferred_bias(module, sum_in_region(output, group))
