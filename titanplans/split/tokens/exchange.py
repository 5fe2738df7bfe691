"""The exchange around a kernel: own tokens of all heads for all tokens of own heads, and back, in one all-to-all each.

    to_heads    [B, ceil(L / c), all rows] of this rank's tokens  ->  [B, L, own rows]
    to_tokens   the other way; each is the backward of the other

Of heads that ranks share each gets the same rows, and their gradients are summed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from titanplans.plan.layout import shard_size
from titanplans.split.collectives import all_to_all
from titanplans.split.tokens.own import OwnTokens

Places = tuple[tuple[int, int], ...]
"""Rows of a dimension: the first and the number of each run."""


class HeadExchange(NamedTuple):
    """Which rows of several projections go to which rank."""

    tokens: OwnTokens
    length: int
    """Tokens of the whole sequence."""
    widths: tuple[int, ...]
    """Rows of each projection."""
    places: tuple[tuple[Places, ...], ...]
    """Of each projection, by rank, that rank's rows."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each projection that a rank gets: as many as the others."""
        return tuple(number_of(places[0]) for places in self.places)


def number_of(places: Places) -> int:
    """Return how many rows `places` are."""
    return sum(size for _, size in places)


def to_heads(own: Sequence[torch.Tensor], exchange: HeadExchange) -> Sequence[torch.Tensor]:
    """Return all tokens of this rank's rows of projections; each rank has its tokens of all rows, in one dtype."""
    return _ToHeads.apply(exchange, *own)  # type: ignore[return-value]


def to_tokens(whole: Sequence[torch.Tensor], exchange: HeadExchange) -> Sequence[torch.Tensor]:
    """Return this rank's tokens of all rows; each rank has all tokens of its own rows."""
    return _ToTokens.apply(exchange, *whole)  # type: ignore[return-value]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange, *own):
        ctx.exchange = exchange
        tokens, dim = exchange.tokens, exchange.tokens.dim
        rows, length = exchange.rows, exchange.length
        lead, offset = own[0].shape[:-1], 0
        sent = own[0].new_empty((tokens.ranks, *lead, sum(rows)))
        for x, places, number in zip(own, exchange.places, rows, strict=True):
            for rank, runs in enumerate(places):
                at = offset
                for first, size in runs:
                    sent[rank, ..., at : at + size] = x[..., first : first + size]
                    at += size
            offset += number
        came, offset, made = all_to_all(sent, tokens.group), 0, []
        size = came.shape[dim + 1]
        full, rest = divmod(length, size)
        for number in rows:
            part = came.narrow(-1, offset, number)
            shape = [*lead[:dim], length, *lead[dim + 1 :], number]
            whole = came.new_empty(shape)
            body = whole.narrow(dim, 0, full * size).unflatten(dim, (full, size))
            body.copy_(part.narrow(0, 0, full).movedim(0, dim))
            if rest:
                whole.narrow(dim, full * size, rest).copy_(part[full].narrow(dim, 0, rest))
            offset += number
            made.append(whole)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads):  # pyrefly: ignore[bad-override]
        return None, *to_tokens(grads, ctx.exchange)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange, *whole):
        ctx.exchange = exchange
        tokens, dim = exchange.tokens, exchange.tokens.dim
        rows, length = exchange.rows, exchange.length
        size, offset = shard_size(length, tokens.ranks), 0
        shape = [*whole[0].shape[:-1], sum(rows)]
        shape[dim : dim + 1] = [tokens.ranks, size]
        sent = whole[0].new_empty((tokens.ranks, *shape[:dim], *shape[dim + 1 :]))
        flat = sent.movedim(0, dim)
        full, rest = divmod(length, size)
        for x, number in zip(whole, rows, strict=True):
            to = flat.narrow(-1, offset, number)
            body = x.narrow(dim, 0, full * size).unflatten(dim, (full, size))
            to.narrow(dim, 0, full).copy_(body)
            if full < tokens.ranks:
                to.narrow(dim, full, tokens.ranks - full).zero_()
                if rest:
                    to.select(dim, full).narrow(dim, 0, rest).copy_(x.narrow(dim, full * size, rest))
            offset += number
        came, offset, made = all_to_all(sent, tokens.group), 0, []
        for places, width, number in zip(exchange.places, exchange.widths, rows, strict=True):
            shared = tokens.ranks * number > width
            out = (
                came.new_zeros((*came.shape[1:-1], width))
                if shared
                else came.new_empty((*came.shape[1:-1], width))
            )
            for rank, runs in enumerate(places):
                at = offset
                for first, run in runs:
                    part = came[rank, ..., at : at + run]
                    out[..., first : first + run] = out[..., first : first + run] + part if shared else part
                    at += run
            offset += number
            made.append(out)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads):  # pyrefly: ignore[bad-override]
        return None, *to_heads(grads, ctx.exchange)


def places_within(outer: Places | None, inner: Places) -> Places:
    """Return where the rows `inner` of a whole lie among the rows `outer` of it; None for all of them.

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
