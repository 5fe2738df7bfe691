"""Collectives on plain local tensors, with gradients; start at `gather`. `raw_collectives` has those without gradients.

    function            forward         backward
    gather              all-gather      reduce-scatter   each rank's gradient of the full tensor is partial
    gather_replicated   all-gather      local shard      the gradient of the full tensor is the same on every rank
    scatter_sum         reduce-scatter  all-gather
    take_shard          local shard     all-gather
    sum_ranks           all-reduce      identity
    sum_gradients       identity        all-reduce
    exchange            all-to-all      all-to-all
    exchange_rows       all-to-all      all-to-all       with a count of rows for each rank

Each backward is another function of this table, so it can be differentiated again. Shards of a dimension that the group's
size does not divide, such as a vocabulary, are padded with zeros in transit; shards of the stream are equal.
"""

from typing import Any

import torch

from titanplans.split.raw_collectives import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_rows,
    group_of,
    reduce_scatter,
    shard_of_rank,
)

__all__ = [
    "Group",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "exchange",
    "exchange_rows",
    "gather",
    "gather_replicated",
    "group_of",
    "reduce_scatter",
    "scatter_sum",
    "shard_of_rank",
    "sum_gradients",
    "sum_in_region",
    "sum_ranks",
    "take_shard",
]


def gather(x: torch.Tensor, dim: int, length: int, group: Group) -> torch.Tensor:
    """Concatenate the ranks' shards `x` along `dim` to `length`, for work that the ranks split; the gradient is partial."""
    return _Gather.apply(x, dim, length, group) if _has_gradient(x) else all_gather(x, dim, length, group)


def gather_replicated(x: torch.Tensor, dim: int, length: int, rank: int, group: Group) -> torch.Tensor:
    """Concatenate the ranks' shards `x` along `dim` to `length`, for work that is the same on every rank."""
    return (
        _GatherReplicated.apply(x, dim, length, rank, group)
        if _has_gradient(x)
        else all_gather(x, dim, length, group)
    )


def scatter_sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Sum `x` over the ranks and return this rank's shard of the sum along `dim`."""
    return _ScatterSum.apply(x, dim, group) if _has_gradient(x) else reduce_scatter(x, dim, group)


def take_shard(x: torch.Tensor, dim: int, rank: int, group: Group) -> torch.Tensor:
    """Take this rank's shard along `dim` of `x`, which is replicated."""
    return _TakeShard.apply(x, dim, rank, group) if _has_gradient(x) else shard_of_rank(x, dim, rank, group)


def sum_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum `x` over the ranks, for work that is the same on every rank."""
    return _Sum.apply(x, group) if _has_gradient(x) else all_reduce(x, group)


def sum_gradients(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the replicated `x`, for work that the ranks split; the backward sums their partial gradients."""
    return _SumGradients.apply(x, group) if _has_gradient(x) else x


def sum_in_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum `x` over the ranks, for work that the ranks split; the backward sums their partial gradients."""
    return sum_gradients(sum_ranks(x, group), group)


def exchange(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Send `x[i]` to rank i; return a tensor of the same shape whose `[i]` comes from rank i."""
    return _Exchange.apply(x, group) if _has_gradient(x) else all_to_all(x, group)


def exchange_rows(x: torch.Tensor, received: list[int], sent: list[int], group: Group) -> torch.Tensor:
    """Send `sent[i]` rows of `x` to rank i; return the received rows, `received[i]` from rank i, in rank order."""
    if not _has_gradient(x):
        return all_to_all_rows(x, received, sent, group)
    return _ExchangeRows.apply(x, received, sent, group)


def _has_gradient(x: torch.Tensor) -> bool:
    """Whether autograd records the collective on `x`. In a backward it does so only with create_graph=True."""
    return x.requires_grad and torch.is_grad_enabled()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, length, group):
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, length, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return scatter_sum(grad, ctx.dim, ctx.group), None, None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, length, rank, group):
        ctx.dim, ctx.rank, ctx.group = dim, rank, group
        return all_gather(x, dim, length, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return take_shard(grad, ctx.dim, ctx.rank, ctx.group), None, None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, group):
        ctx.dim, ctx.length, ctx.group = dim, x.shape[dim], group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return gather(grad, ctx.dim, ctx.length, ctx.group), None, None


class _TakeShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, rank, group):
        ctx.dim, ctx.length, ctx.rank, ctx.group = dim, x.shape[dim], rank, group
        return shard_of_rank(x, dim, rank, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return gather_replicated(grad, ctx.dim, ctx.length, ctx.rank, ctx.group), None, None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return sum_ranks(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, group):
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return sum_gradients(grad, ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, group):
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return exchange(grad, ctx.group), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, received, sent, group):
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return all_to_all_rows(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return exchange_rows(grad, ctx.sent, ctx.received, ctx.group), None, None, None
