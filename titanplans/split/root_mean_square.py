"""The root mean square of a sharded width: `root_ratio`."""

from typing import Any

import torch

from titanplans.split.collectives import Group, gather, sum_in_region

EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
"""Names of the epsilon that norms add to the mean square."""


def root_ratio(
    x: torch.Tensor, epsilon: float, group: Group, members: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return the RMS of this rank's slice `x` [..., width] divided by the RMS of all `members`' slices, [..., 1].

    Args:
        x: this rank's slice.
        epsilon: added to each mean square.
        group: the ranks that communicate.
        members: indices in `group` of the ranks whose slices are normalised together, this rank among them; None: all.
    """
    local = _MeanSquare.apply(x, epsilon)
    if members is None or len(members) == group[1]:
        return _RootRatio.apply(local, sum_in_region(local, group), group[1])
    # All ranks have to call one collective, so a group with several sets of members gathers instead.
    gathered = gather(local, local.ndim - 1, group[1], group)
    if members[-1] - members[0] == len(members) - 1:
        total = gathered.narrow(-1, members[0], len(members)).sum(-1, keepdim=True)
    else:
        total = sum(gathered.narrow(-1, rank, 1) for rank in members)  # type: ignore[assignment]
    return _RootRatio.apply(local, total, len(members))


class _MeanSquare(torch.autograd.Function):
    """Mean square of `x` [..., width] plus `epsilon`, [..., 1], in float32 or wider; fewer kernels than autograd's."""

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
    """sqrt(local / (total / ranks)); fewer kernels than autograd's."""

    @staticmethod
    def forward(ctx: Any, local, total, ranks):
        ratio = (local / total).mul_(ranks).sqrt_()
        ctx.save_for_backward(local, total, ratio)
        return ratio

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        local, total, ratio = ctx.saved_tensors
        half = grad * ratio * 0.5
        return half / local, -(half / total), None
