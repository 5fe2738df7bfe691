"""The root mean square of a sharded width: the ratio of that of this rank's slice to that of the full width."""

from typing import Any

import torch

from titanplans.split.collectives import Group, gather, sum_in_region

EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
"""Names of the epsilon that norms add to the mean square."""


def root_ratio(
    x: torch.Tensor, epsilon: float, group: Group, members: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return the root mean square of this rank's `x` [..., width] over that of all `members` together, [..., 1].

    `members`: numbers of ranks in `group`; None: all.
    """
    own = _MeanSquare.apply(x, epsilon)
    if members is None or len(members) == group[1]:
        return _RootRatio.apply(own, sum_in_region(own, group), group[1])
    of_ranks = gather(own, own.ndim - 1, group[1], group)
    if members[-1] - members[0] == len(members) - 1:
        total = of_ranks.narrow(-1, members[0], len(members)).sum(-1, keepdim=True)
    else:
        total = sum(of_ranks.narrow(-1, rank, 1) for rank in members)  # type: ignore[assignment]
    return _RootRatio.apply(own, total, len(members))


class _MeanSquare(torch.autograd.Function):
    """The mean square of `x` [..., width] plus `epsilon`, [..., 1], in float32 or wider; fewer kernels than autograd's."""

    @staticmethod
    def forward(ctx: Any, x, epsilon):
        ctx.save_for_backward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide.square().mean(-1, keepdim=True).add_(epsilon)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        return (x * (grad * (2 / x.shape[-1]))).to(x.dtype), None


class _RootRatio(torch.autograd.Function):
    """sqrt(own / (total / ranks)); fewer kernels than autograd's."""

    @staticmethod
    def forward(ctx: Any, own, total, ranks):
        ratio = (own / total).mul_(ranks).sqrt_()
        ctx.save_for_backward(own, total, ratio)
        return ratio

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        own, total, ratio = ctx.saved_tensors
        half = grad * ratio * 0.5
        return half / own, -(half / total), None
