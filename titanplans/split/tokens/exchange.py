"""The exchange around a kernel: own tokens of all heads for all tokens of own heads, and back, an all-to-all each.

    to_heads    [B, L / c, all rows] of this rank's tokens  ->  [B, L, own rows]
    to_tokens   the other way; each is the backward of the other

Ranks that share a head get the same rows; their gradients are summed.
"""

from typing import Any, NamedTuple

import torch

from titanplans.split.collectives import all_to_all
from titanplans.split.own_tokens import LocalTokens

RowRanges = tuple[tuple[int, int], ...]
"""Rows of a dimension: the first and the number of each run."""


class Share:
    """How the rows of one projection are shared out.

    Args:
        ranges: by rank, that rank's rows.
        width: all rows.
    """

    def __init__(self, ranges: tuple[RowRanges, ...], width: int):
        self.ranges, self.width = ranges, width
        self.rows = number_of(ranges[0])
        """Rows that a rank gets: as many as the others."""
        self.in_order = ranges == tuple(((rank * self.rows, self.rows),) for rank in range(len(ranges)))
        """Whether the ranks' rows lie one after the other already."""


class HeadExchange(NamedTuple):
    """Which rows of a projection go to which rank."""

    tokens: LocalTokens
    share: Share


def number_of(ranges: RowRanges) -> int:
    """Return how many rows `ranges` are."""
    return sum(size for _, size in ranges)


def to_heads(own: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    """Return all tokens of this rank's rows of a projection; each rank has its tokens of all rows."""
    if not torch.is_grad_enabled():  # a backward
        return _heads(own, exchange)
    return _ToHeads.apply(own, exchange)  # type: ignore[return-value]


def to_tokens(full: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    """Return this rank's tokens of all rows; each rank has all tokens of its own rows."""
    if not torch.is_grad_enabled():
        return _tokens(full, exchange)
    return _ToTokens.apply(full, exchange)  # type: ignore[return-value]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own, exchange):
        ctx.exchange = exchange
        return _heads(own, exchange)

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


def _heads(own: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    tokens, share = exchange
    dim, ranks, lead = tokens.dim, tokens.ranks, own.shape[:-1]
    order = (len(lead), *range(len(lead)), -1)
    by_rank = (own if share.in_order else _by_rank(own, share)).reshape(*lead, ranks, share.rows)
    came = all_to_all(by_rank.permute(order).contiguous(), tokens.group).movedim(0, dim)
    full = came.reshape(*lead[:dim], ranks * lead[dim], *lead[dim + 1 :], -1).contiguous()
    # What comes out of an autograd function must be no view, or code may not change it in place.
    return full if full._base is None else torch.ops.aten._unsafe_view(full, full.shape)


def _tokens(full: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    tokens, share = exchange
    dim, ranks, lead = tokens.dim, tokens.ranks, full.shape[:-1]
    size = lead[dim] // ranks
    by_rank = full.reshape(*lead[:dim], ranks, size, *lead[dim + 1 :], -1).movedim(dim, 0)
    came = all_to_all(by_rank.contiguous(), tokens.group).movedim(0, -2)
    rows = came.reshape(*lead[:dim], size, *lead[dim + 1 :], -1)
    return rows.contiguous() if share.in_order else _put_back(rows, share)


def _by_rank(x: torch.Tensor, share: Share) -> torch.Tensor:
    """Return the rows of each rank, one rank's after the other's."""
    return torch.cat([x.narrow(-1, first, size) for runs in share.ranges for first, size in runs], -1)


def _put_back(x: torch.Tensor, share: Share) -> torch.Tensor:
    """Return the rows that the ranks' rows `x` are, where ranks share some their sum."""
    shared = x.shape[-1] > share.width
    made = (x.new_zeros if shared else x.new_empty)((*x.shape[:-1], share.width))
    at = 0
    for runs in share.ranges:
        for first, size in runs:
            part, to = x.narrow(-1, at, size), made.narrow(-1, first, size)
            if shared:
                to.add_(part)
            else:
                to.copy_(part)
            at += size
    return made


def ranges_within(outer: RowRanges | None, inner: RowRanges) -> RowRanges:
    """Return where the rows `inner` of a full tensor lie among the rows `outer` of it; None for all of them.

    Raises:
        ValueError: they are not among them.
    """
    if outer is None:
        return inner
    found: list[tuple[int, int]] = []
    for first, size in inner:
        before = 0
        for start, number in outer:
            if start <= first and first + size <= start + number:
                found.append((before + first - start, size))
                break
            before += number
        else:
            raise ValueError(f"rows {first} to {first + size} are none of {outer}")
    joined = found[:1]
    for first, size in found[1:]:
        last, number = joined[-1]
        if last + number == first:
            joined[-1] = (last, number + size)
        else:
            joined.append((first, size))
    return tuple(joined)
