"""Linear modules, cut by weights: column-wise nothing is sent, row-wise the ranks' partial outputs are summed."""

from functools import cache, partial
from typing import Any

import torch
from torch import nn

from titanplans.plan.styles.base import held
from titanplans.plan.styles.projections import Colwise, Rowwise, RowwiseInRegion
from titanplans.split.collectives import Group, sum_in_region
from titanplans.split.costs import Call, ExpectedCollective, summed_inside
from titanplans.split.parameters.local_parameters import add_deferred_bias
from titanplans.split.state import specialise, subclass
from titanplans.split.stream import Border
from titanplans.split.tensors.convolution import check_groups
from titanplans.split.tensors.rules import Rule, Site


def _install_colwise(style: Colwise, module: nn.Module, site: Site) -> None:
    if type(module).forward is nn.Linear.forward and "bias" in held(module):
        specialise(module, _with_bias_apart(type(module)))
    check_groups(module, style)


def _install_rowwise(style: Rowwise, module: nn.Module, site: Site) -> None:
    if style.reduce_output:
        module.register_forward_hook(partial(_leave, site.border))


def _leave(border: Border, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return add_deferred_bias(module, border.leave(output))


def _install_in_region(style: RowwiseInRegion, module: nn.Module, site: Site) -> None:
    module.register_forward_hook(partial(_sum, site.ranks.group))


def _expect_in_region(
    style: RowwiseInRegion, module: nn.Module, call: Call
) -> tuple[ExpectedCollective, ...]:
    return (summed_inside(call.tokens * len(held(module)["weight"])),)


def _sum(group: Group, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return add_deferred_bias(module, sum_in_region(output, group))


@cache
def _with_bias_apart(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass a Linear, under the same name, so that a compiled graph has a product and an addition of the bias.

    Inductor's pass fuses an all-gather with a product (`mm`) only, not with `addmm`.
    """

    def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return nn.functional.linear(input, module.weight) + module.bias
        return nn.functional.linear(input, module.weight, module.bias)

    return subclass(cls, {"forward": forward})


COLWISE, ROWWISE = Rule(_install_colwise), Rule(_install_rowwise)
ROWWISE_IN_REGION = Rule(_install_in_region, _expect_in_region)
