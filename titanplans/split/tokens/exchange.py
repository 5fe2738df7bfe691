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


class Share:
    """How the rows of one projection are shared out.

    Args:
        places: by rank, that rank's rows.
        width: all rows.
    """

    def __init__(self, places: tuple[Places, ...], width: int):
        self.places, self.width = places, width
        self.rows = number_of(places[0])
        """Rows that a rank gets: as many as the others."""
        self.in_order = places == tuple(((rank * self.rows, self.rows),) for rank in range(len(places)))
        """Whether the ranks' rows lie one behind the other already."""


class HeadExchange(NamedTuple):
    """Which rows of several projections go to which rank."""

    tokens: OwnTokens
    length: int
    """Tokens of the whole sequence."""
    shares: tuple[Share, ...]
    """Of each projection."""


def number_of(places: Places) -> int:
    """Return how many rows `places` are."""
    return sum(size for _, size in places)


def to_heads(own: Sequence[torch.Tensor], exchange: HeadExchange) -> Sequence[torch.Tensor]:
    """Return all tokens of this rank's rows of projections; each rank has its tokens of all rows, in one dtype."""
    if not torch.is_grad_enabled():  # a backward
        return _heads(own, exchange)
    return _ToHeads.apply(exchange, *own)  # type: ignore[return-value]


def to_tokens(whole: Sequence[torch.Tensor], exchange: HeadExchange) -> Sequence[torch.Tensor]:
    """Return this rank's tokens of all rows; each rank has all tokens of its own rows."""
    if not torch.is_grad_enabled():
        return _tokens(whole, exchange)
    return _ToTokens.apply(exchange, *whole)  # type: ignore[return-value]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange, *own):
        ctx.exchange = exchange
        return _heads(own, exchange)

    @staticmethod
    def backward(ctx: Any, *grads):  # pyrefly: ignore[bad-override]
        return None, *to_tokens(grads, ctx.exchange)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange, *whole):
        ctx.exchange = exchange
        return _tokens(whole, exchange)

    @staticmethod
    def backward(ctx: Any, *grads):  # pyrefly: ignore[bad-override]
        return None, *to_heads(grads, ctx.exchange)


def _heads(own: Sequence[torch.Tensor], exchange: HeadExchange) -> tuple[torch.Tensor, ...]:
    tokens, length, shares = exchange
    dim, ranks, lead = tokens.dim, tokens.ranks, own[0].shape[:-1]
    order = (len(lead), *range(len(lead)), -1)
    by_rank = [
        (x if share.in_order else _by_rank(x, share)).reshape(*lead, ranks, share.rows).permute(order)
        for x, share in zip(own, shares, strict=True)
    ]
    came = all_to_all(_together(by_rank), tokens.group).movedim(0, dim)
    shape = (*lead[:dim], ranks * lead[dim], *lead[dim + 1 :], -1)
    made = []
    for part in came.split_with_sizes([share.rows for share in shares], -1):
        whole = part.reshape(shape)
        whole = (whole if shape[dim] == length else whole.narrow(dim, 0, length)).contiguous()
        # What comes out of an autograd function must be no view, or code may not change it in place.
        made.append(whole if whole._base is None else torch.ops.aten._unsafe_view(whole, whole.shape))
    return tuple(made)


def _tokens(whole: Sequence[torch.Tensor], exchange: HeadExchange) -> tuple[torch.Tensor, ...]:
    tokens, length, shares = exchange
    dim, ranks, lead = tokens.dim, tokens.ranks, whole[0].shape[:-1]
    size = shard_size(length, ranks)
    if missing := size * ranks - length:
        zeros = [x.new_zeros((*lead[:dim], missing, *x.shape[dim + 1 :])) for x in whole]
        whole = [torch.cat(pair, dim) for pair in zip(whole, zeros, strict=True)]
    cut = (*lead[:dim], ranks, size, *lead[dim + 1 :], -1)
    came = all_to_all(_together([x.reshape(cut).movedim(dim, 0) for x in whole]), tokens.group)
    shape, made = (*lead[:dim], size, *lead[dim + 1 :], -1), []
    for part, share in zip(
        came.movedim(0, -2).split_with_sizes([share.rows for share in shares], -1), shares, strict=True
    ):
        rows = part.reshape(shape)
        made.append(rows.contiguous() if share.in_order else _put_back(rows, share))
    return tuple(made)


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return `parts`, [ranks, ..., rows] each, one behind the other, in one copy."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, -1)


def _by_rank(x: torch.Tensor, share: Share) -> torch.Tensor:
    """Return the rows of each rank, one rank's behind the other's."""
    return torch.cat([x.narrow(-1, first, size) for runs in share.places for first, size in runs], -1)


def _put_back(x: torch.Tensor, share: Share) -> torch.Tensor:
    """Return the rows that the ranks' rows `x` are, where ranks share some their sum."""
    shared = x.shape[-1] > share.width
    made = (x.new_zeros if shared else x.new_empty)((*x.shape[:-1], share.width))
    at = 0
    for runs in share.places:
        for first, size in runs:
            part, to = x.narrow(-1, at, size), made.narrow(-1, first, size)
            if shared:
                to.add_(part)
            else:
                to.copy_(part)
            at += size
    return made


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
