"""Styles of a norm over a width that the ranks share, such as one norm over all heads together."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.plan.layout import Layout, Rows
from titanplans.plan.styles.base import Style

EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
"""Names of the epsilon that norms add to the mean square."""

Statistic = Callable[..., torch.Tensor]
"""What a norm takes the mean square of, given the arguments of its forward."""


class SplitNorm(Style):
    """Split the width of a root-mean-square norm; one number a token, its mean square, is averaged over the ranks.

    Args:
        rows: the rows of the weight [width] that a rank reads, where ranks share heads; None for even shards.
        statistic: what the mean square is taken of, where that is not the first argument: a gate before the norm.
        groups: into which the width is cut, each with a mean square of its own; neighbouring ranks share one where there
            are too few of them.
    """

    inside = True

    def __init__(self, *, rows: Rows | None = None, statistic: Statistic | None = None, groups: int = 1):
        self.rows, self.statistic, self.groups = rows, statistic, groups

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        return {"groups of its width": (self.groups, True)}

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        if self.rows is not None:
            return Layout(Replicate(), Partial(), deferred=name == "bias", rows=self.rows)
        return Layout(Shard(0), Shard(0), deferred=name == "bias")

    def refusal(self, module: nn.Module) -> str | None:
        if not any(hasattr(module, name) for name in EPSILONS):
            return (
                f"it has no {' or '.join(EPSILONS)}, so its epsilon is not known: give it this "
                "attribute, or take gathered_in_region()"
            )
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            return "it subtracts a mean, too: take gathered_in_region()"
        return None


class GatheredInRegion(Style):
    """Run a module on the whole width, on every rank, and go on with this rank's part of its output.

    Costs a gather of activations, where `SplitNorm` sums one number a token, and is right for any norm. All positional
    arguments are split alike.

    Args:
        dim: the dimension of the arguments and of the output that is split: the last, or that of heads.
    """

    inside = True

    def __init__(self, *, dim: int = -1):
        self.dim = dim

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), Partial())
