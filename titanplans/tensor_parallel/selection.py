"""The rows that a rank reads of a parameter, out of how it is stored (`layout.Rows`), and their way back as a gradient.

Each way is one copy, or one on either side of the all-to-all: row by row in autograd's own operators every run of rows
would cost a tensor of zeros of the whole parameter's size in the backward, and an addition.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from titanplans.tensor_parallel.collectives import Group, all_to_all, exchange
from titanplans.tensor_parallel.layout import Layout, Run


def selected(local: torch.Tensor, layout: Layout, rank: int, group: Group) -> torch.Tensor:
    """Return the rows of this rank: of its own copy, or of the shards of another dimension that the ranks hold."""
    assert layout.rows is not None
    dim, runs = layout.rows
    if isinstance(layout.placement, Shard):
        return _OfShards.apply(local, dim, runs, layout.placement.dim, group)
    places = [(run.at(rank), run.size) for run in runs]
    return local.narrow(dim, *places[0]) if len(places) == 1 else _OfCopy.apply(local, dim, places)


class _OfCopy(torch.autograd.Function):
    """Rows at `places` [(first, size), …] of a whole tensor."""

    @staticmethod
    def forward(ctx: Any, whole, dim, places):
        ctx.dim, ctx.places, ctx.shape = dim, places, whole.shape
        return torch.cat([whole.narrow(dim, first, size) for first, size in places], dim)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        whole = grad.new_zeros(ctx.shape)
        parts = grad.split([size for _, size in ctx.places], ctx.dim)
        for part, (first, size) in zip(parts, ctx.places, strict=True):
            whole.narrow(ctx.dim, first, size).copy_(part)
        return whole, None, None


class _OfShards(torch.autograd.Function):
    """Rows of `dim`, of which every rank holds all, in its shard of the dimension `sharded`."""

    @staticmethod
    def forward(ctx: Any, shard, dim, runs, sharded, group):
        ctx.dim, ctx.runs, ctx.sharded, ctx.group = dim, runs, sharded, group
        ranks, rows = group[1], shard.movedim(dim, 0)
        sent = torch.cat([rows.narrow(0, run.at(rank), run.size) for rank in range(ranks) for run in runs])
        came = all_to_all(sent.view(ranks, -1, *rows.shape[1:]), group)
        return torch.cat([part.movedim(0, dim) for part in came.unbind()], sharded)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        ranks = ctx.group[1]
        sent = torch.stack([part.movedim(ctx.dim, 0) for part in grad.chunk(ranks, ctx.sharded)])
        came = exchange(sent, ctx.group).movedim(1, ctx.dim + 1)
        return _put_back(came.unbind(), ctx.dim, ctx.runs), None, None, None, None


def _put_back(grads: Sequence[torch.Tensor], dim: int, runs: Sequence[Run]) -> torch.Tensor:
    """Return the gradient of all rows of `dim`, out of those of each rank's rows; of rows that ranks share, the sum."""
    parts: dict[int, torch.Tensor] = {}
    for rank, grad in enumerate(grads):
        for run, part in zip(runs, grad.split([run.size for run in runs], dim), strict=True):
            first = run.at(rank)
            parts[first] = parts[first] + part if first in parts else part
    return torch.cat([parts[first] for first in sorted(parts)], dim)
