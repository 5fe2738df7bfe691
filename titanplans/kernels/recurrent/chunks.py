"""Chunked linear attention with decays and rank-one corrections, computed by few operators, mostly matrix products.

    S_t = diag(exp(g_t)) S_(t-1) + b_t (a_t^T S_(t-1)) + k_t v_t^T,     o_t = q_t^T S_t        S [K, V], for each head

Within a chunk, u_t = a_t^T S_(t-1) is the solution of a triangular system, since S_(t-1) contains the chunk's initial state
and the writes k_s v_s^T + b_s u_s^T of its earlier tokens. Chunks are computed in parallel, and only their states one after
another. All decays are products of numbers in [0, 1], without divisions, so no exponential overflows.
"""

import math
from typing import NamedTuple

import torch

from titanplans.errors import KernelError

CHUNK_SIZE = 64
"""Largest number of tokens in a chunk, a power of two; chosen with benchmarks/cpu_kernels.py."""
BLOCK_OF_VECTORS = 2
"""Tokens per block h if each key channel has its own decay: pairwise decays [h, h, K] are stored within blocks."""

CHUNK_SIZE_OF_SLOTS = 16
"""Tokens per chunk of `slot_attention`; small, since it stores pairwise decays [C, C, M]."""


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
    """Return o [B, T, H, V] and the final state [B, H, K, V].

    Args:
        q, k: [B, T, G, K] for G groups of consecutive heads.
        v: [B, T, H, V].
        g: log decays, at most 0, [B, T, H] or [B, T, H, K]; None: no decay.
        state: the initial state; None: zeros.
        a: reads the state for the correction, [B, T, H, K]; None: no correction.
        b: writes the correction, [B, T, H, K].

    Raises:
        KernelError: the shapes do not match.
    """
    length, heads, values, keys = *v.shape[1:], k.shape[-1]
    by_head = {"g": g, "a": a, "b": b}
    wrong = [name for name, x in by_head.items() if x is not None and x.shape[:3] != v.shape[:3]]
    wrong += [name for name, x in (("q", q), ("k", k)) if heads % x.shape[2] or x.shape[:2] != v.shape[:2]]
    if wrong:
        inputs = {"q": q, "k": k, "v": v} | by_head
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items() if x is not None)
        raise KernelError(
            f"linear attention of {shapes}: batch, tokens or heads of {wrong[0]} differ from those of v"
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
    # All terms are linear in the initial state of a chunk: `outputs` and `added` are the terms without it, `reads` and
    # `kept` multiply it.
    outputs = _products(q, k, decays) @ v
    reads, kept, added = q * decays.from_start, decays.from_start[..., -1:, :].mT, _writes(k, decays) @ v
    corrections = [()] * v.shape[2]
    if a is not None and b is not None:
        a, b = _chunked(a, size), _chunked(b, size)
        before = decays.before_token()
        right_side = torch.cat([_products(a, k, before) @ v, a * before.from_start], -1)
        system = -_products(a, b, before)
        solution = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        # u_t is the sum of `u` and `u_of_state` @ (initial state).
        u, u_of_state = solution.split([values, keys], -1)
        scores, writes = _products(q, b, decays), _writes(b, decays)
        outputs, reads, added = outputs + scores @ u, reads + scores @ u_of_state, added + writes @ u
        corrections = [*zip(u_of_state.unbind(2), writes.unbind(2), strict=True)]
    initial_states = []
    for kept_m, added_m, correction in zip(kept.unbind(2), added.unbind(2), corrections, strict=True):
        initial_states.append(state)
        after = state * kept_m + added_m
        state = after + correction[1] @ (correction[0] @ state) if correction else after
    outputs = outputs + reads @ torch.stack(initial_states, 2)
    return outputs.flatten(2, 3)[:, :, :length].transpose(1, 2).contiguous(), state


def _chunked(x: torch.Tensor, size: int) -> torch.Tensor:
    """Split x [B, T, H, D] into chunks [B, H, M, C, D], padded with zeros, which have no key and no decay."""
    if missing := -x.shape[1] % size:
        x = torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], 1)
    return x.transpose(1, 2).unflatten(2, (-1, size)).contiguous()


class _Decays(NamedTuple):
    """Decays in a chunk: within blocks of h tokens, and across the boundary of two blocks of h, 2h, 4h, .., C / 2.

    The decay from token s to token t is exp(g_(s+1) + .. + g_t).
    """

    within: torch.Tensor
    """From each token s of a block to each token t, [.., C / h, t, s, D]; 0 if s is later than t."""
    across: list[tuple[torch.Tensor, torch.Tensor]]
    """From the boundary to each token of the second block, and from each token of the first block to the boundary."""
    from_start: torch.Tensor
    """From the start of the chunk to each token, including its decay, [.., C, D]."""
    to_end: torch.Tensor
    """From each token, without its decay, to the end of the chunk, [.., C, D]."""

    def before_token(self) -> "_Decays":
        """Return the decays up to each token without its own decay, i.e. the decays up to the previous token."""
        across = [(_shift(second), first) for second, first in self.across]
        within = torch.cat([torch.zeros_like(self.within[..., :1, :, :]), self.within[..., :-1, :, :]], -3)
        return _Decays(within, across, _shift(self.from_start), self.to_end)


def _shift(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.ones_like(x[..., :1, :]), x[..., :-1, :]], -2)


def _decays(g: torch.Tensor) -> _Decays:
    """Return the decays of chunks with log decays `g` [.., C, D]."""
    size = g.shape[-2] if g.shape[-1] == 1 else BLOCK_OF_VECTORS
    from_start = g.exp()[..., None, :]
    to_end, within, across = torch.ones_like(from_start), torch.ones_like(from_start[..., None, :]), []
    while from_start.shape[-3] > 1:
        (start, second), (first, end) = (x.unflatten(-3, (-1, 2)).unbind(-3) for x in (from_start, to_end))
        if first.shape[-2] < size:
            within = _join(within, second[..., None, :] * first[..., None, :, :])
        else:
            across.append((second, first))
        from_start = torch.cat([start, start[..., -1:, :] * second], -2)
        to_end = torch.cat([first * second[..., -1:, :], end], -2)
    return _Decays(within, across, from_start.squeeze(-3), to_end.squeeze(-3))


def _join(blocks: torch.Tensor, across: torch.Tensor) -> torch.Tensor:
    """Join pairs of diagonal blocks [.., 2n, h, h, D] into [.., n, 2h, 2h, D], with `across` [.., n, h, h, D] below them."""
    first, second = blocks.unflatten(-4, (-1, 2)).unbind(-4)
    halves = torch.cat([first, torch.zeros_like(first)], -2), torch.cat([across, second], -2)
    return torch.cat(halves, -3)


def _writes(x: torch.Tensor, decays: _Decays) -> torch.Tensor:
    """Return x [.., C, K], decayed to the end of its chunk, [.., K, C]."""
    return (x * decays.to_end).mT


def _products(x: torch.Tensor, y: torch.Tensor, decays: _Decays) -> torch.Tensor:
    """Return the products of x_t and y_s with the decays from s to t, [.., C, C]; x and y are [.., C, K]."""
    x_b, y_b = (z.unflatten(-2, (-1, decays.within.shape[-2])) for z in (x, y))
    if decays.within.shape[-1] == 1:
        products = (x_b @ y_b.mT)[..., None] * decays.within
    else:
        products = (x_b[..., None, :] * decays.within * y_b[..., None, :, :]).sum(-1, keepdim=True)
    for second, first in decays.across:
        halves = (-1, 2, first.shape[-2])
        x_2, y_1 = x.unflatten(-2, halves)[..., 1, :, :], y.unflatten(-2, halves)[..., 0, :, :]
        products = _join(products, ((x_2 * second) @ (y_1 * first).mT)[..., None])
    return products[..., 0, :, :, 0]


def slot_attention(
    q: torch.Tensor, k: torch.Tensor, s: torch.Tensor, g: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, T, H, M] and the final state [B, H, K, M] of S_t = S_(t-1) diag(exp(g_t)) + k_t s_t^T, o_t = S_t^T q_t.

    q, k are [B, T, H, K], s and g [B, T, H, M]. Unlike in `linear_attention`, decays are per value channel of the state.
    """
    if state is None:
        state = s.new_zeros(*s.shape[:1], *k.shape[2:], s.shape[-1])
    outputs = []
    chunks = (x.transpose(1, 2).split(CHUNK_SIZE_OF_SLOTS, 2) for x in (q, k, s, _finite(g)))
    for q_n, k_n, s_n, g_n in zip(*chunks, strict=True):
        log_decay = g_n.cumsum(2)
        total = log_decay[:, :, -1:]
        decayed = between(log_decay) * s_n[:, :, None]
        outputs.append(((q_n @ k_n.mT)[..., None] * decayed).sum(3) + (q_n @ state) * log_decay.exp())
        state = state * total.exp() + k_n.mT @ (s_n * (total - log_decay).exp())
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), state


def scan(
    x: torch.Tensor, g: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h_t = exp(g_t) h_(t-1) + x_t [B, T, ...], and the last h [B, ...].

    Each chunk takes log2(C) steps, each over twice the distance of the step before (Hillis and Steele 1986).

    Args:
        x: [B, T, ...].
        g: log decays, at most 0, which broadcast to x.
        state: the initial h, [B, ...]; None: zeros.
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


def between(log_decay: torch.Tensor) -> torch.Tensor:
    """Return the decays [.., t, s, D] from token s to t, 0 if s is later, of cumulative log decays [.., C, D]."""
    mask = torch.ones(2 * log_decay.shape[-2:-1], dtype=torch.bool, device=log_decay.device).tril()
    differences = log_decay[..., None, :] - log_decay[..., None, :, :]
    return differences.masked_fill(~mask[..., None], -torch.inf).exp()


def _finite(g: torch.Tensor) -> torch.Tensor:
    """Clamp `g`, because differences of -inf are NaN. The exponential of the bound is 0, too."""
    return g.clamp(min=1.25 * math.log(torch.finfo(g.dtype).tiny))
