"""The rows that a rank reads of a parameter, out of how it is stored (`layout.Rows`), and their way back as a gradient.

Forward and backward are one copy each, or one on either side of the all-to-all. With autograd's `narrow` and `cat` each run
would allocate zeros of the parameter's size in the backward, and add them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from titanplans.split.collectives import Group, all_to_all, exchange
from titanplans.split.layout import Layout, Run


def selected(local: torch.Tensor, layout: Layout, rank: int, group: Group) -> torch.Tensor:
    """Return the rows of this rank: of its own copy, or of the shards of another dimension that the ranks hold."""
    assert layout.rows is not None
    dim, runs = layout.rows
    if isinstance(layout.placement, Shard):
        return _OfShards.apply(local, dim, runs, layout.placement.dim, rank, group)
    return of_ranges(local, dim, [(run.first_row(rank), run.row_count(rank)) for run in runs])


def of_ranges(local: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the rows of `dim` at `ranges`, the first and the number of each run."""
    return local.narrow(dim, *ranges[0]) if len(ranges) == 1 else _OfCopy.apply(local, dim, ranges)


class _OfCopy(torch.autograd.Function):
    """Rows at `ranges` [(first, size), …] of a full tensor."""

    @staticmethod
    def forward(ctx: Any, full, dim, ranges):
        ctx.dim, ctx.ranges, ctx.shape = dim, ranges, full.shape
        return torch.cat([full.narrow(dim, first, size) for first, size in ranges], dim)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        full = grad.new_zeros(ctx.shape)
        slices = grad.split([size for _, size in ctx.ranges], ctx.dim)
        for one, (first, size) in zip(slices, ctx.ranges, strict=True):
            full.narrow(ctx.dim, first, size).copy_(one)
        return full, None, None


class _OfShards(torch.autograd.Function):
    """Rows of `dim`: every rank holds all of them, in its shard of the dimension `sharded`.

    On the way each rank has as many: who has fewer gets them filled up.
    """

    @staticmethod
    def forward(ctx: Any, shard, dim, runs, sharded, rank, group):
        ctx.dim, ctx.runs, ctx.sharded, ctx.rank, ctx.group = dim, runs, sharded, rank, group
        ranks, rows = group[1], shard.movedim(dim, 0)
        sent = torch.cat(
            [
                _filled(rows.narrow(0, run.first_row(r), run.row_count(r)), run, 0)
                for r in range(ranks)
                for run in runs
            ]
        )
        came = all_to_all(sent.view(ranks, -1, *rows.shape[1:]), group)
        made = torch.cat([one.movedim(0, dim) for one in came.unbind()], sharded)
        if all(run.is_even for run in runs):
            return made
        slices = zip(made.split([run.size for run in runs], dim), runs, strict=True)
        return torch.cat([one.narrow(dim, 0, run.row_count(rank)) for one, run in slices], dim)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        ranks, runs = ctx.group[1], ctx.runs
        if not all(run.is_even for run in runs):
            slices = grad.split([run.row_count(ctx.rank) for run in runs], ctx.dim)
            grad = torch.cat([_filled(*one, ctx.dim) for one in zip(slices, runs, strict=True)], ctx.dim)
        sent = torch.stack([one.movedim(ctx.dim, 0) for one in grad.chunk(ranks, ctx.sharded)])
        came = exchange(sent, ctx.group).movedim(1, ctx.dim + 1)
        return _put_back(came.unbind(), ctx.dim, ctx.runs), None, None, None, None, None


def _filled(rows: torch.Tensor, run: Run, dim: int) -> torch.Tensor:
    """Return a rank's `rows` of `run` in dimension `dim`, filled up with zeros to as many as the first rank has."""
    missing = run.size - rows.shape[dim]
    return torch.nn.functional.pad(rows, (0, 0) * (rows.ndim - 1 - dim) + (0, missing)) if missing else rows


def _put_back(grads: Sequence[torch.Tensor], dim: int, runs: Sequence[Run]) -> torch.Tensor:
    """Return the gradient of all rows of `dim` from those of each rank's rows; rows that ranks share are summed."""
    slices: dict[int, torch.Tensor] = {}
    for rank, grad in enumerate(grads):
        for run, one in zip(runs, grad.split([run.size for run in runs], dim), strict=True):
            first, one = run.first_row(rank), one.narrow(dim, 0, run.row_count(rank))
            slices[first] = slices[first] + one if first in slices else one
    return torch.cat([slices[first] for first in sorted(slices)], dim)
