"""`gathered_in_region()`: gather a width that is split over the ranks, for any norm over this width."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate

from titanplans.split.collectives import gather
from titanplans.split.costs import Call, ExpectedCollective, cost_of_gather
from titanplans.split.layout import Layout
from titanplans.split.local_code import HeadRanks
from titanplans.styles.base import Site, SplitOver, Style


class GatheredInRegion(Style):
    """Run a module on the full width, on every rank, and continue with this rank's shard of its output.

        forward   all-gather of x_BLf over the width, y_BLF = norm(x_BLF), this rank's shard of y
        backward  dx_BLF is partial: reduce-scatter over the width; dw is partial

    This is correct for any norm, but it gathers activations, whereas `split_norm()` sums one number per token. All
    positional tensor arguments must be sharded alike.

    Args:
        dim: the sharded dimension of the arguments and of the output: the last one, or the heads' dimension.
    """

    is_inside_region = needs_equal_shards = True
    listed_as = "gathered"

    def __init__(self, *, dim: int = -1):
        self.dim = dim

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return Layout(Replicate(), Partial())

    def by_weights(self, module: nn.Module, site: Site) -> None:
        hooks = _GatherHooks(self.dim, site.ranks)
        module.register_forward_pre_hook(hooks.enter)
        module.register_forward_hook(hooks.leave)

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        return tuple(cost_of_gather(shape.numel() * call.degree) for shape in call.shapes)


class _GatherHooks:
    """The hooks of one module; `width` is the size of this rank's shard in the current call."""

    def __init__(self, dim: int, ranks: HeadRanks):
        self.dim, self.ranks, self.width = dim, ranks, 0

    def enter(self, module: nn.Module, args: Any) -> Any:
        self.width = args[0].shape[self.dim]
        return tuple(self._gather(x) if isinstance(x, torch.Tensor) else x for x in args)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        degree, order = self.ranks.degree, self.ranks.order
        full = gather(x, self.dim % x.ndim, x.shape[self.dim] * degree, self.ranks.group)
        # The gathered shards are in the order of the group's ranks; `order` sorts them by heads.
        if order == tuple(range(degree)):
            return full
        shards = full.chunk(degree, self.dim)
        return torch.cat([shards[rank] for rank in order], self.dim)

    def leave(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.narrow(self.dim, self.ranks.rank * self.width, self.width).contiguous()
