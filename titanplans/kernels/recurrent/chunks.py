"""Linear attention with decays and corrections of rank one, by chunks of tokens: few operators, all of them matrix products.

    S_t = diag(exp(g_t)) S_(t-1) + b_t (a_t^T S_(t-1)) + k_t v_t^T,     o_t = q_t^T S_t        S [K, V], for each head

Within a chunk, u_t = a_t^T S_(t-1) is the solution of a triangular system: it reads what earlier tokens of the chunk wrote,
which is k_s v_s^T + b_s u_s^T, and the state that entered. Decays are exponentials of differences of sums of g, all in
[0, 1]: there is no exponential of a positive number. Gated linear attention, with which people train on a CPU, has its own
operator in `gla_chunks.py`, without [C, C, K] tensors.
"""

import math

import torch

CHUNK_SIZE = 64
"""Of one decay a head, or of none."""
CHUNK_SIZE_OF_VECTORS = 16
"""Of a decay for each element of a key: decays between tokens are [C, C, K] then."""


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
        state: the first one; None: zeros.
        a: what reads the state for the correction, [B, T, H, K]; None: no correction.
        b: where it is written, [B, T, H, K].
    """
    heads = v.shape[2]
    q, k = (x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    if g is None:
        g = v.new_zeros(v.shape[:3])
    size = CHUNK_SIZE if g.dim() == 3 else CHUNK_SIZE_OF_VECTORS
    g = g[..., None] if g.dim() == 3 else g
    if state is None:
        state = v.new_zeros(v.shape[0], heads, k.shape[-1], v.shape[-1])
    given = [q, k, v, _finite(g)] + ([] if a is None or b is None else [a, b])
    outputs = []
    for chunk in zip(*(x.transpose(1, 2).split(size, 2) for x in given), strict=True):
        o, state = _chunk(state, *chunk)
        outputs.append(o)
    o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return o.transpose(1, 2).contiguous(), state


def _chunk(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, H, C, V] and the state after the chunk; g is [B, H, C, 1 or K]."""
    past = g.cumsum(2)
    last = past[:, :, -1:]
    kept, to_end = state * last.exp().mT, (last - past).exp()
    if a is None or b is None:
        scores = _scores(q, k, decays(past))
        return scores @ v + (q * past.exp()) @ state, kept + (k * to_end).mT @ v
    # What reads for the correction, of the state before the token's own decay, and then what reads for the output.
    at, reading = torch.cat([past - g, past], 2), torch.cat([a, q], 2)
    between = torch.cat([decays(past, past - g, -1), decays(past)], 2)
    of_values, of_corrections = _scores(reading, k, between), _scores(reading, b, between)
    known_a, known_q = (of_values @ v + (reading * at.exp()) @ state).chunk(2, 2)
    of_a, of_q = of_corrections.chunk(2, 2)
    u = torch.linalg.solve_triangular(-of_a, known_a, upper=False, unitriangular=True)
    return known_q + of_q @ u, kept + (k * to_end).mT @ v + (b * to_end).mT @ u


def slot_attention(
    q: torch.Tensor, k: torch.Tensor, s: torch.Tensor, g: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, T, H, M] and the last state [B, H, K, M] of S_t = S_(t-1) diag(exp(g_t)) + k_t s_t^T, o_t = S_t^T q_t.

    q, k are [B, T, H, K], s and g [B, T, H, M]: here what is written decays, not what it is written to.
    """
    if state is None:
        state = s.new_zeros(*s.shape[:1], *k.shape[2:], s.shape[-1])
    outputs = []
    parts = (x.transpose(1, 2).split(CHUNK_SIZE_OF_VECTORS, 2) for x in (q, k, s, _finite(g)))
    for q_n, k_n, s_n, g_n in zip(*parts, strict=True):
        past = g_n.cumsum(2)
        last = past[:, :, -1:]
        written = decays(past) * s_n[:, :, None]
        outputs.append(((q_n @ k_n.mT)[..., None] * written).sum(3) + (q_n @ state) * past.exp())
        state = state * last.exp() + k_n.mT @ (s_n * (last - past).exp())
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), state


def scan(
    x: torch.Tensor, g: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h_t = exp(g_t) h_(t-1) + x_t [B, T, ...], and the last one [B, ...].

    In log2(C) steps a chunk; each adds the values half as far back as the next (Hillis and Steele 1986).

    Args:
        x: [B, T, ...].
        g: logarithms of decays, at most 0, which broadcast to x.
        state: the first one, [B, ...]; None: zeros.
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


def decays(past: torch.Tensor, at: torch.Tensor | None = None, until: int = 0) -> torch.Tensor:
    """Return the decay [B, H, C, C, D] from each token to each row; 0 from tokens after the row's own.

    Args:
        past: sums of the logarithms of decays up to each token, [B, H, C, D].
        at: those up to each row; None: the same.
        until: -1: 0 from the row's own token, too.
    """
    at = past if at is None else at
    seen = torch.ones(2 * at.shape[2:3], dtype=torch.bool, device=at.device).tril(until)
    return (at[:, :, :, None] - past[:, :, None]).masked_fill(~seen[..., None], -torch.inf).exp()


def _scores(x: torch.Tensor, y: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """Return the products [B, H, R, C] of rows [B, H, R, K] and tokens [B, H, C, K] with the decays between them."""
    if between.shape[-1] == 1:
        return (x @ y.mT) * between[..., 0]
    return (x[:, :, :, None] * between * y[:, :, None]).sum(-1)


def _finite(g: torch.Tensor) -> torch.Tensor:
    """Return g without -inf, whose differences are no numbers: what is lower than this decays to 0 all the same."""
    return g.clamp(min=1.25 * math.log(torch.finfo(g.dtype).tiny))
