"""Norms over a width that the ranks share, cut by weights: their statistic is summed, or their width gathered."""

from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.plan.styles.norms import EPSILONS, GatheredInRegion, SplitNorm
from titanplans.split.collectives import Group, gather
from titanplans.split.costs import Call, ExpectedCollective, gathered_inside, summed_inside
from titanplans.split.local_code import HeadRanks
from titanplans.split.parameters.local_parameters import add_deferred_bias
from titanplans.split.root_mean_square import root_ratio
from titanplans.split.tensors.rules import Rule, Site


def _install_norm(style: SplitNorm, module: nn.Module, site: Site) -> None:
    """Let the module divide its part by the root mean square of that part, and multiply by the ratio of the roots.

    The ratio is that of the part's root to the whole width's, so the module's own code and kernels stand, with a weight or
    1 + weight, with a gate behind the norm. A bias is added afterwards.
    """
    rank, ranks = site.ranks.rank, site.ranks.degree
    if isinstance(module, nn.RMSNorm):
        (width,) = module.normalized_shape
        rows = width // ranks if style.rows is None else sum(run.size for run in style.rows.runs)
        module.normalized_shape = (rows,)
    sharing = max(1, ranks // style.groups)
    first = rank // sharing * sharing
    members = tuple(site.ranks.order[first : first + sharing])
    module.register_forward_hook(partial(_correct, style, site.ranks.group, members), with_kwargs=True)


def _expect_norm(style: SplitNorm, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
    sharing = max(1, call.degree // style.groups)
    if sharing == 1:
        return ()
    return (
        summed_inside(call.tokens) if sharing == call.degree else gathered_inside(call.tokens * call.degree),
    )


def _correct(
    style: SplitNorm,
    group: Group,
    members: tuple[int, ...],
    module: nn.Module,
    args: Any,
    kwargs: Any,
    output: Any,
) -> Any:
    if len(members) > 1:
        x = args[0] if style.statistic is None else style.statistic(*args, **kwargs)
        epsilon = next(getattr(module, name) for name in EPSILONS if hasattr(module, name))
        if epsilon is None:  # torch's RMSNorm: that of the input's dtype
            epsilon = torch.finfo(x.dtype).eps
        output = (output * root_ratio(x, epsilon, group, members)).to(output.dtype)
    return add_deferred_bias(module, output)


def _install_gathered(style: GatheredInRegion, module: nn.Module, site: Site) -> None:
    gathered = _Gathered(style.dim, site.ranks)
    module.register_forward_pre_hook(gathered.enter)
    module.register_forward_hook(gathered.leave)


def _expect_gathered(
    style: GatheredInRegion, module: nn.Module, call: Call
) -> tuple[ExpectedCollective, ...]:
    return tuple(gathered_inside(shape.numel() * call.degree) for shape in call.given)


class _Gathered:
    """The hooks of a module that runs on the whole width: `width` is this rank's part of it in the call that runs."""

    def __init__(self, dim: int, ranks: HeadRanks):
        self.dim, self.ranks, self.width = dim, ranks, 0

    def enter(self, module: nn.Module, args: Any) -> Any:
        self.width = args[0].shape[self.dim]
        return tuple(map(self._whole, args))

    def _whole(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        number, order = self.ranks.degree, self.ranks.order
        whole = gather(x, self.dim % x.ndim, x.shape[self.dim] * number, self.ranks.group)
        if order == tuple(range(number)):
            return whole
        parts = whole.chunk(number, self.dim)
        return torch.cat([parts[rank] for rank in order], self.dim)

    def leave(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.narrow(self.dim, self.ranks.rank * self.width, self.width).contiguous()


SPLIT_NORM, GATHERED = Rule(_install_norm, _expect_norm), Rule(_install_gathered, _expect_gathered)
