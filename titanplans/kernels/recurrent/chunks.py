"""Chunked linear attention with decays and rank-one corrections: few operators, mostly matrix products.

    S_t = diag(exp(g_t)) S_(t-1) + b_t (a_t^T S_(t-1)) + k_t v_t^T,     o_t = q_t^T S_t        S [K, V], for each head

Within a chunk, u_t = a_t^T S_(t-1) solves a triangular system: it reads the initial state of the chunk and what its
earlier tokens wrote, k_s v_s^T + b_s u_s^T. Chunks are computed in parallel, only their states one after the other. All
decays are products of numbers in [0, 1]: nothing is divided, and no exponential overflows.
"""

import math
from typing import NamedTuple

import torch

from titanplans.errors import KernelError

CHUNK_SIZE = 64
"""Tokens of a chunk at most, a power of two; chosen by benchmarks/cpu_kernels.py."""
BLOCK_OF_VECTORS = 2
"""Tokens of a block whose pairwise decays are stored, [h, h, K], where each element of a key decays by itself."""

CHUNK_SIZE_OF_SLOTS = 16
"""Small, since `slot_attention` stores pairwise decays [C, C, M]."""


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    *,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, T, H, V] and the last state [B, H, K, V].

    Args:
        q, k: [B, T, G, K], G groups of neighbouring heads.
        v: [B, T, H, V].
        g: logarithms of decays, at most 0, [B, T, H] or [B, T, H, K]; None: no decay.
        state: the initial one; None: zeros.
        a: reads the state for the correction, [B, T, H, K]; None: no correction.
        b: writes the correction, [B, T, H, K].

    Raises:
        KernelError: shapes that don't agree.
    """
    length, heads, values, keys = *v.shape[1:], k.shape[-1]
    of_heads = {"g": g, "a": a, "b": b}
    apart = [name for name, x in of_heads.items() if x is not None and x.shape[:3] != v.shape[:3]]
    apart += [name for name, x in (("q", q), ("k", k)) if heads % x.shape[2] or x.shape[:2] != v.shape[:2]]
    if apart:
        given = {"q": q, "k": k, "v": v} | of_heads
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in given.items() if x is not None)
        raise KernelError(
            f"linear attention of {shapes}: batch, tokens or heads of {apart[0]} are not those of v"
        )
    q, k = (x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    g = v.new_zeros(v.shape[:3]) if g is None else g
    if state is None:
        state = v.new_zeros(v.shape[0], heads, keys, values)
    size = 1
    while size < min(length, CHUNK_SIZE):
        size *= 2
    q, k, v = (_chunked(x, size) for x in (q, k, v))
    decays = _decays(_chunked(g if g.dim() == 4 else g[..., None], size))
    outputs = _products(q, k, decays) @ v
    reading, kept, new = q * decays.from_start, decays.from_start[..., -1:, :].mT, _written(k, decays) @ v
    corrections = [()] * v.shape[2]
    if a is not None and b is not None:
        a, b = _chunked(a, size), _chunked(b, size)
        before = decays.before_own()
        known = torch.cat([_products(a, k, before) @ v, a * before.from_start], -1)
        system = -_products(a, b, before)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        u, of_state = solved.split([values, keys], -1)  # u without the initial state, and by it
        read, written = _products(q, b, decays), _written(b, decays)
        outputs, reading, new = outputs + read @ u, reading + read @ of_state, new + written @ u
        corrections = [*zip(of_state.unbind(2), written.unbind(2), strict=True)]
    entering = []
    for kept_m, new_m, correction in zip(kept.unbind(2), new.unbind(2), corrections, strict=True):
        entering.append(state)
        after = state * kept_m + new_m
        state = after + correction[1] @ (correction[0] @ state) if correction else after
    outputs = outputs + reading @ torch.stack(entering, 2)
    return outputs.flatten(2, 3)[:, :, :length].transpose(1, 2).contiguous(), state


def _chunked(x: torch.Tensor, size: int) -> torch.Tensor:
    """[B, T, H, D] -> [B, H, M, C, D]; missing tokens are zeros: no key, no decay, so no effect."""
    if missing := -x.shape[1] % size:
        x = torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], 1)
    return x.transpose(1, 2).unflatten(2, (-1, size)).contiguous()


class _Decays(NamedTuple):
    """Decays in a chunk: within blocks of h tokens, and across the boundary of two blocks of h, 2h, 4h, .., C / 2."""

    within: torch.Tensor
    """From each token of a block to each later one, its own included, [.., C / h, h, h, D]."""
    across: list[tuple[torch.Tensor, torch.Tensor]]
    """From the boundary to each token of the second block, its own included; from each of the first to the boundary."""
    from_start: torch.Tensor
    """From the start of the chunk to each token, its own included, [.., C, D]."""
    to_end: torch.Tensor
    """From each token, its own excluded, to the end of the chunk, [.., C, D]."""

    def before_own(self) -> "_Decays":
        """Return the decays up to each token, its own excluded: those of the token before."""
        across = [(_shifted(second), first) for second, first in self.across]
        within = torch.cat([torch.zeros_like(self.within[..., :1, :, :]), self.within[..., :-1, :, :]], -3)
        return _Decays(within, across, _shifted(self.from_start), self.to_end)


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.ones_like(x[..., :1, :]), x[..., :-1, :]], -2)


def _decays(g: torch.Tensor) -> _Decays:
    """Return the decays whose logarithms are `g` [.., C, D]."""
    size = g.shape[-2] if g.shape[-1] == 1 else BLOCK_OF_VECTORS
    from_start = g.exp()[..., None, :]
    to_end, within, across = torch.ones_like(from_start), torch.ones_like(from_start[..., None, :]), []
    while from_start.shape[-3] > 1:
        (start, second), (first, end) = (x.unflatten(-3, (-1, 2)).unbind(-3) for x in (from_start, to_end))
        if first.shape[-2] < size:
            within = _joined(within, second[..., None, :] * first[..., None, :, :])
        else:
            across.append((second, first))
        from_start = torch.cat([start, start[..., -1:, :] * second], -2)
        to_end = torch.cat([first * second[..., -1:, :], end], -2)
    return _Decays(within, across, from_start.squeeze(-3), to_end.squeeze(-3))


def _joined(blocks: torch.Tensor, across: torch.Tensor) -> torch.Tensor:
    """Return blocks of 2h: neighbours in `blocks` [.., 2n, h, h, D], joined by what is `across` them [.., n, h, h, D]."""
    first, second = blocks.unflatten(-4, (-1, 2)).unbind(-4)
    rows = torch.cat([first, torch.zeros_like(first)], -2), torch.cat([across, second], -2)
    return torch.cat(rows, -3)


def _written(x: torch.Tensor, decays: _Decays) -> torch.Tensor:
    """Return what x [.., C, K] writes into the state after its chunk, [.., K, C]."""
    return (x * decays.to_end).mT


def _products(x: torch.Tensor, y: torch.Tensor, decays: _Decays) -> torch.Tensor:
    """Return the products of x_t and y_s, [.., C, K] both, with the decays from s to t: [.., C, C]."""
    x_b, y_b = (z.unflatten(-2, (-1, decays.within.shape[-2])) for z in (x, y))
    if decays.within.shape[-1] == 1:
        found = (x_b @ y_b.mT)[..., None] * decays.within
    else:
        found = (x_b[..., None, :] * decays.within * y_b[..., None, :, :]).sum(-1, keepdim=True)
    for second, first in decays.across:
        halves = (-1, 2, first.shape[-2])
        x_2, y_1 = x.unflatten(-2, halves)[..., 1, :, :], y.unflatten(-2, halves)[..., 0, :, :]
        found = _joined(found, ((x_2 * second) @ (y_1 * first).mT)[..., None])
    return found[..., 0, :, :, 0]


def slot_attention(
    q: torch.Tensor, k: torch.Tensor, s: torch.Tensor, g: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, T, H, M] and the last state [B, H, K, M] of S_t = S_(t-1) diag(exp(g_t)) + k_t s_t^T, o_t = S_t^T q_t.

    q, k are [B, T, H, K], s and g [B, T, H, M]: the decay is that of the state's value dimension, not of its key dimension.
    """
    if state is None:
        state = s.new_zeros(*s.shape[:1], *k.shape[2:], s.shape[-1])
    outputs = []
    parts = (x.transpose(1, 2).split(CHUNK_SIZE_OF_SLOTS, 2) for x in (q, k, s, _finite(g)))
    for q_n, k_n, s_n, g_n in zip(*parts, strict=True):
        past = g_n.cumsum(2)
        last = past[:, :, -1:]
        written = between(past) * s_n[:, :, None]
        outputs.append(((q_n @ k_n.mT)[..., None] * written).sum(3) + (q_n @ state) * past.exp())
        state = state * last.exp() + k_n.mT @ (s_n * (last - past).exp())
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), state


def scan(
    x: torch.Tensor, g: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h_t = exp(g_t) h_(t-1) + x_t [B, T, ...], and the last one [B, ...].

    By chunks, each in log2(C) steps of doubling distance (Hillis and Steele 1986).

    Args:
        x: [B, T, ...].
        g: logarithms of decays, at most 0, which broadcast to x.
        state: the initial one, [B, ...]; None: zeros.
    """
    outputs = []
    for h, decay in zip(*(y.split(CHUNK_SIZE, 1) for y in (x, g.exp())), strict=True):
        if state is not None:
            h = torch.cat([h[:, :1] + decay[:, :1] * state[:, None], h[:, 1:]], 1)
        step = 1
        while step < h.shape[1]:
            h = torch.cat([h[:, :step], h[:, step:] + decay[:, step:] * h[:, :-step]], 1)
            decay = torch.cat([decay[:, :step], decay[:, step:] * decay[:, :-step]], 1)
            step *= 2
        state = h[:, -1]
        outputs.append(h)
    assert state is not None
    return torch.cat(outputs, 1), state


def between(past: torch.Tensor) -> torch.Tensor:
    """Return the decay [.., C, C, D] from each token to each row, 0 from later ones; `past`: cumulative logs [.., C, D]."""
    seen = torch.ones(2 * past.shape[-2:-1], dtype=torch.bool, device=past.device).tril()
    differences = past[..., None, :] - past[..., None, :, :]
    return differences.masked_fill(~seen[..., None], -torch.inf).exp()


def _finite(g: torch.Tensor) -> torch.Tensor:
    """Return `g` without -inf, whose differences are NaN: below the bound a decay is 0 all the same."""
    return g.clamp(min=1.25 * math.log(torch.finfo(g.dtype).tiny))
