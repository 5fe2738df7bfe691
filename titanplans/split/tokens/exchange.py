"""The all-to-alls around a mixer's kernel: `to_heads` exchanges local tokens of all heads for all tokens of local heads.

    to_heads    [B, L / c, all rows]  ->  [B, L, local rows], with L / c local tokens
    to_tokens   the reverse; each is the backward of the other

Here, rows are the rows of the projection's weight, i.e. the last dimension of its output. Ranks that share a head get the
same rows; their gradients are summed.
"""

from typing import Any, NamedTuple

import torch

from titanplans.split.collectives import all_to_all
from titanplans.split.local_tokens import LocalTokens
from titanplans.torch_private.autograd import is_view

RowRanges = tuple[tuple[int, int], ...]
"""Rows of a dimension: (first row, row count) of each run."""


class RowAssignment:
    """Which rows of a projection each rank gets.

    Args:
        ranges: the rows of each rank.
        width: the number of all rows.
    """

    def __init__(self, ranges: tuple[RowRanges, ...], width: int):
        self.ranges, self.width = ranges, width
        self.rows = row_count(ranges[0])
        """The number of rows that a rank gets, the same for all ranks."""
        self.is_in_order = ranges == tuple(((rank * self.rows, self.rows),) for rank in range(len(ranges)))
        """The ranks' rows are consecutive, in rank order."""


class HeadExchange(NamedTuple):
    """An all-to-all of tokens for rows of a projection."""

    tokens: LocalTokens
    assignment: RowAssignment


def row_count(ranges: RowRanges) -> int:
    """Return the number of rows in `ranges`."""
    return sum(size for _, size in ranges)


def to_heads(local: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    """Exchange local tokens of all rows for all tokens of this rank's rows."""
    if not torch.is_grad_enabled():  # for example in a backward
        return _heads(local, exchange)
    return _ToHeads.apply(local, exchange)  # type: ignore[return-value]


def to_tokens(full: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    """Exchange all tokens of this rank's rows for local tokens of all rows; rows that ranks share are summed."""
    if not torch.is_grad_enabled():
        return _tokens(full, exchange)
    return _ToTokens.apply(full, exchange)  # type: ignore[return-value]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local, exchange):
        ctx.exchange = exchange
        return _heads(local, exchange)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return to_tokens(grad, ctx.exchange), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full, exchange):
        ctx.exchange = exchange
        return _tokens(full, exchange)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        return to_heads(grad, ctx.exchange), None


def _heads(local: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    tokens, assignment = exchange
    dim, ranks, lead = tokens.dim, tokens.ranks, local.shape[:-1]
    order = (len(lead), *range(len(lead)), -1)
    by_rank = local if assignment.is_in_order else _by_rank(local, assignment)
    by_rank = by_rank.reshape(*lead, ranks, assignment.rows)
    received = all_to_all(by_rank.permute(order).contiguous(), tokens.group).movedim(0, dim)
    full = received.reshape(*lead[:dim], ranks * lead[dim], *lead[dim + 1 :], -1).contiguous()
    # The output of an autograd function must not be a view, because a mixer's code could not change it in place.
    return torch.ops.aten._unsafe_view(full, full.shape) if is_view(full) else full


def _tokens(full: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    tokens, assignment = exchange
    dim, ranks, lead = tokens.dim, tokens.ranks, full.shape[:-1]
    size = lead[dim] // ranks
    by_rank = full.reshape(*lead[:dim], ranks, size, *lead[dim + 1 :], -1).movedim(dim, 0)
    received = all_to_all(by_rank.contiguous(), tokens.group).movedim(0, -2)
    rows = received.reshape(*lead[:dim], size, *lead[dim + 1 :], -1)
    return rows.contiguous() if assignment.is_in_order else _put_back(rows, assignment)


def _by_rank(x: torch.Tensor, assignment: RowAssignment) -> torch.Tensor:
    """Reorder the rows of `x` so that each rank's are consecutive, in rank order."""
    return torch.cat([x.narrow(-1, first, size) for runs in assignment.ranges for first, size in runs], -1)


def _put_back(x: torch.Tensor, assignment: RowAssignment) -> torch.Tensor:
    """Put the ranks' rows `x` back into the projection's order; rows that ranks share are summed."""
    has_shared_rows = x.shape[-1] > assignment.width
    full = (x.new_zeros if has_shared_rows else x.new_empty)((*x.shape[:-1], assignment.width))
    offset = 0
    for runs in assignment.ranges:
        for first, size in runs:
            source, target = x.narrow(-1, offset, size), full.narrow(-1, first, size)
            if has_shared_rows:
                target.add_(source)
            else:
                target.copy_(source)
            offset += size
    return full


def ranges_within(outer: RowRanges | None, inner: RowRanges) -> RowRanges:
    """Return the positions of the rows `inner` of a full tensor in a tensor that has only its rows `outer` (None: all).

    Raises:
        ValueError: a run of `inner` is not inside a run of `outer`.
    """
    if outer is None:
        return inner
    positions: list[tuple[int, int]] = []
    for first, size in inner:
        offset = 0
        for start, length in outer:
            if start <= first and first + size <= start + length:
                positions.append((offset + first - start, size))
                break
            offset += length
        else:
            raise ValueError(f"rows {first} to {first + size} are not inside one of {outer}")
    joined = positions[:1]
    for first, size in positions[1:]:
        last, length = joined[-1]
        if last + length == first:
            joined[-1] = (last, length + size)
        else:
            joined.append((first, size))
    return tuple(joined)
