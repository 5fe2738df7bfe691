"""Select the rows of a stored parameter that a rank uses (`layout.Rows`), and pass their gradient back.

With autograd's `narrow` and `cat` the backward would allocate and add zeros of the parameter's size for each run of rows.
Here the backward allocates the gradient once. If the parameter is sharded, forward and backward need one all-to-all each.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from titanplans.split.collectives import Group, all_to_all, exchange
from titanplans.split.layout import Layout, Run


def select_rows(local: torch.Tensor, layout: Layout, rank: int, group: Group) -> torch.Tensor:
    """Return this rank's rows: taken from its replica, or from all ranks' shards of another dimension by an all-to-all."""
    assert layout.rows is not None
    dim, runs = layout.rows
    if isinstance(layout.placement, Shard):
        return _FromShards.apply(local, dim, runs, layout.placement.dim, rank, group)
    return take_ranges(local, dim, [(run.first_row(rank), run.row_count(rank)) for run in runs])


def take_ranges(local: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the rows of `dim` at `ranges` [(first row, row count), ...]."""
    return local.narrow(dim, *ranges[0]) if len(ranges) == 1 else _FromReplica.apply(local, dim, ranges)


class _FromReplica(torch.autograd.Function):
    """Rows at `ranges` [(first row, row count), ...] of a full tensor."""

    @staticmethod
    def forward(ctx: Any, full, dim, ranges):
        ctx.dim, ctx.ranges, ctx.shape = dim, ranges, full.shape
        return torch.cat([full.narrow(dim, first, size) for first, size in ranges], dim)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        full = grad.new_zeros(ctx.shape)
        slices = grad.split([size for _, size in ctx.ranges], ctx.dim)
        for rows, (first, size) in zip(slices, ctx.ranges, strict=True):
            full.narrow(ctx.dim, first, size).copy_(rows)
        return full, None, None


class _FromShards(torch.autograd.Function):
    """Rows of `dim` of a parameter that is sharded along another dimension, `sharded`: a rank stores a slice of every row.

    An all-to-all needs equal sizes, so rows are padded to the first rank's count in transit.
    """

    @staticmethod
    def forward(ctx: Any, shard, dim, runs, sharded, rank, group):
        ctx.dim, ctx.runs, ctx.sharded, ctx.rank, ctx.group = dim, runs, sharded, rank, group
        ranks, rows = group[1], shard.movedim(dim, 0)
        sent = torch.cat(
            [
                _padded(rows.narrow(0, run.first_row(r), run.row_count(r)), run, 0)
                for r in range(ranks)
                for run in runs
            ]
        )
        received = all_to_all(sent.view(ranks, -1, *rows.shape[1:]), group)
        selected = torch.cat([x.movedim(0, dim) for x in received.unbind()], sharded)
        if all(run.is_even for run in runs):
            return selected
        slices = zip(selected.split([run.size for run in runs], dim), runs, strict=True)
        return torch.cat([x.narrow(dim, 0, run.row_count(rank)) for x, run in slices], dim)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        ranks, runs = ctx.group[1], ctx.runs
        if not all(run.is_even for run in runs):
            slices = grad.split([run.row_count(ctx.rank) for run in runs], ctx.dim)
            grad = torch.cat([_padded(x, run, ctx.dim) for x, run in zip(slices, runs, strict=True)], ctx.dim)
        sent = torch.stack([x.movedim(ctx.dim, 0) for x in grad.chunk(ranks, ctx.sharded)])
        received = exchange(sent, ctx.group).movedim(1, ctx.dim + 1)
        return _put_back(received.unbind(), ctx.dim, ctx.runs), None, None, None, None, None


def _padded(rows: torch.Tensor, run: Run, dim: int) -> torch.Tensor:
    """Return a rank's `rows` of `run` in dimension `dim`, padded with zeros to the first rank's count."""
    missing = run.size - rows.shape[dim]
    return torch.nn.functional.pad(rows, (0, 0) * (rows.ndim - 1 - dim) + (0, missing)) if missing else rows


def _put_back(grads: Sequence[torch.Tensor], dim: int, runs: Sequence[Run]) -> torch.Tensor:
    """Combine the ranks' gradients of their rows into the gradient of all rows of `dim`; shared rows are summed."""
    slices: dict[int, torch.Tensor] = {}
    for rank, grad in enumerate(grads):
        for run, padded in zip(runs, grad.split([run.size for run in runs], dim), strict=True):
            first, rows = run.first_row(rank), padded.narrow(dim, 0, run.row_count(rank))
            slices[first] = slices[first] + rows if first in slices else rows
    return torch.cat([slices[first] for first in sorted(slices)], dim)
