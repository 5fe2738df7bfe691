"""Collectives on plain local tensors, with and without gradients.

    function         forward         backward
    gather           all-gather      reduce-scatter   the ranks' gradients of the full tensor are partial: summed
    collect          all-gather      own shard        the same gradient of the full tensor on every rank
    scatter_sum      reduce-scatter  all-gather
    take_shard       own shard       all-gather
    sum_ranks        all-reduce      identity
    sum_gradients    identity        all-reduce
    exchange         all-to-all      all-to-all
    exchange_rows    all-to-all      all-to-all       of other numbers of rows for each rank

Pairs: each is the other's backward (an exchange's is an exchange); so a backward may be differentiated
again. Shards of a dimension that the number of ranks does not divide, such as a vocabulary, are filled up with zeros on
their way; the stream's are equal.
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
    own_shard,
    reduce_scatter,
)

__all__ = [
    "Group",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collect",
    "exchange",
    "exchange_rows",
    "gather",
    "group_of",
    "own_shard",
    "reduce_scatter",
    "scatter_sum",
    "sum_gradients",
    "sum_in_region",
    "sum_ranks",
    "take_shard",
]


def gather(x: torch.Tensor, dim: int, length: int, group: Group) -> torch.Tensor:
    """Concatenate the ranks' shards `x` along `dim`, `length` long; what follows is each rank's share of the work."""
    return _Gather.apply(x, dim, length, group) if _has_gradient(x) else all_gather(x, dim, length, group)


def collect(x: torch.Tensor, dim: int, length: int, rank: int, group: Group) -> torch.Tensor:
    """Concatenate the ranks' shards `x` along `dim`, `length` long; what follows is the same on every rank."""
    return (
        _Collect.apply(x, dim, length, rank, group) if _has_gradient(x) else all_gather(x, dim, length, group)
    )


def scatter_sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Sum the ranks' `x` and give each its shard of `dim`."""
    return _ScatterSum.apply(x, dim, group) if _has_gradient(x) else reduce_scatter(x, dim, group)


def take_shard(x: torch.Tensor, dim: int, rank: int, group: Group) -> torch.Tensor:
    """Take this rank's shard of `dim` of `x`, which is full on every rank."""
    return _TakeShard.apply(x, dim, rank, group) if _has_gradient(x) else own_shard(x, dim, rank, group)


def sum_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' `x`; what follows is the same on every rank."""
    return _Sum.apply(x, group) if _has_gradient(x) else all_reduce(x, group)


def sum_gradients(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, which is replicated; after it each rank does a shard of the work."""
    return _SumGradients.apply(x, group) if _has_gradient(x) else x


def sum_in_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' `x`; each goes on with its share of the work, so the gradients of the sum are shares, too."""
    return sum_gradients(sum_ranks(x, group), group)


def exchange(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Send `x[i]` to rank i; return the same shape; its `[i]` has come from rank i."""
    return _Exchange.apply(x, group) if _has_gradient(x) else all_to_all(x, group)


def exchange_rows(x: torch.Tensor, received: list[int], sent: list[int], group: Group) -> torch.Tensor:
    """Send `sent[i]` rows of `x` to rank i; return the rows that came, `received[i]` from rank i, in order."""
    if not _has_gradient(x):
        return all_to_all_rows(x, received, sent, group)
    return _ExchangeRows.apply(x, received, sent, group)


def _has_gradient(x: torch.Tensor) -> bool:
    """Whether the collective on `x` is part of the graph: not in a backward, unless that is to be differentiated again."""
    return x.requires_grad and torch.is_grad_enabled()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dim, length, group):
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, length, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return scatter_sum(grad, ctx.dim, ctx.group), None, None, None


class _Collect(torch.autograd.Function):
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
        return own_shard(x, dim, rank, group)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return collect(grad, ctx.dim, ctx.length, ctx.rank, ctx.group), None, None, None


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
