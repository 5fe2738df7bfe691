"""What FLA's recurrent kernels compute, each by its formula over `chunks.linear_attention`; `recurrence` calls them.

All take inputs [B, T, H, ...] of one dtype, q and k perhaps of fewer heads than v, and first states [B, H, ...] or None.
They return outputs [B, T, H, V] and the last states. Arguments have the names of the kernels'.
FLA's own references, fla/ops/*/naive.py, loop over the tokens; tests compare with what stands in each docstring.
"""

import torch
import torch.nn.functional as F

from titanplans.kernels.layers.packing import Result
from titanplans.kernels.recurrent.chunks import linear_attention, scan, slot_attention
from titanplans.kernels.widen import Widen

Tensor = torch.Tensor


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> Result:
    """S = diag(e^g) S + k v^T, o = scale S^T q (Yang et al. 2023, arXiv:2312.06635, eq. 3); g is [B, T, H, K], or gk."""
    return linear_attention(q * scale, k, v, gk if g is None else g, initial_state)


def hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None) -> Result:
    """h = e^g h + x; inputs are [B, T, D]."""
    return scan(x, g, initial_state)


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> Result:
    """S = e^g S + k v^T, o = scale S^T q."""
    return linear_attention(q * scale, k, v, g, initial_state)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    written: Tensor | None = None,
) -> Result:
    """S = e^g S; then S = S + written (beta (v - S^T k))^T, o = scale S^T q; `written` is k unless given.

    g is [B, T, H], of KDA [B, T, H, K].
    """
    q, k, written = (_of_heads(x, v.shape[2]) for x in (q, k, k if written is None else written))
    write = written * beta[..., None]
    reading = -k if g is None else -k * (g if g.dim() == 4 else g[..., None]).exp()
    return linear_attention(q * scale, write, v, g, initial_state, a=reading, b=write)


def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    p: Tensor | None = None,
) -> Result:
    """S = e^g S + k (beta (v - S^T p))^T, o = scale S^T q; p is k unless given.

    The S that p reads has not decayed yet, as in FLA's kernels and its `naive_chunk_comba`; in its
    `naive_recurrent_comba` it has.
    """
    q, k, p = (_of_heads(x, v.shape[2]) for x in (q, k, k if p is None else p))
    write = k * beta[..., None]
    return linear_attention(q * scale, write, v, g, initial_state, a=-p, b=write)


def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float,
    num_householder: int = 1,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> Result:
    """Apply the delta rule for each of the `num_householder` keys and values of a token; k, v, beta [B, T num, H, ...].

    The state decays before the first of them and is read after the last.
    """

    def at(x: Tensor, step: int) -> Tensor:
        after = num_householder - 1 - step
        return F.pad(x[:, :, None], (*(0, 0) * (x.dim() - 2), step, after)).flatten(1, 2)

    g = None if g is None else at(g, 0)
    o, state = delta_rule(at(q, num_householder - 1), k, v, beta, scale, g, initial_state)
    return o[:, num_householder - 1 :: num_householder], state


def preconditioned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | float = -0.2,
) -> Result:
    """The delta rule, but written are k x^(-r / (1 + |r|)), r = log(A + eps) - log_atk_scale, A = e^g_atk A + beta_atk k^2.

    A is [B, G, K] of the G heads of keys.
    """
    squares, last = scan(beta_atk[..., None] * k.square(), g_atk[..., None], initial_A_state)
    if isinstance(log_atk_scale, Tensor):
        log_atk_scale = log_atk_scale.to(k.dtype)[:, None]
    r = (squares + eps).log() - log_atk_scale
    o, state = delta_rule(q, k, v, beta, scale, g, initial_state, written=k * x ** -(r / (1 + r.abs())))
    return o, state, last


def mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    h_kk_init: Tensor | None = None,
    h_kv_init: Tensor | None = None,
) -> Result:
    """H = e^g H + beta k k^T, S = e^g S + beta k v^T, o = S^T (H + diag(lamb))^-1 q, the system solved exactly."""
    written = k * beta[..., None]
    sums, h_kk = scan(written[..., None] * k[..., None, :], g[..., None, None], h_kk_init)
    systems = sums + torch.diag_embed(lamb.to(k.dtype))
    o, h_kv = linear_attention(torch.linalg.solve(systems, q), written, v, g, h_kv_init)
    return o, h_kk, h_kv


def path_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    scale: float,
    g: Tensor | None = None,
    use_cache: bool = False,
) -> Result:
    """Softmax attention to keys that each later token t takes through I - beta_t w_t w_t^T.

    Beside the outputs: on request the keys [B, T, H, K] as the last token sees them, for decoding.
    """
    keys_heads = k.shape[2]
    q, k, v, w, beta = (_of_heads(x, q.shape[2]).transpose(1, 2) for x in (q, k, v, w, beta))
    # What each token takes away along w of each earlier key, which earlier tokens have changed before.
    written = w * beta[..., None]
    along = torch.linalg.solve_triangular(
        (written @ w.mT).tril(-1), (written @ k.mT).tril(-1), upper=False, unitriangular=True
    )
    scores = (q @ k.mT).tril() - (q @ w.mT).tril() @ along
    if g is not None:
        past = g.transpose(1, 2).cumsum(2)
        scores = scores + past[..., None] - past[:, :, None]
    later = torch.ones(2 * q.shape[2:3], dtype=torch.bool, device=q.device).triu(1)
    o = (scores * scale).masked_fill(later, -torch.inf).softmax(-1) @ v
    last = (k - along.mT @ w).transpose(1, 2)[:, :, :: q.shape[1] // keys_heads] if use_cache else None
    return o.transpose(1, 2).contiguous(), last


def gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor,
    scale: float,
    initial_state: tuple[Tensor, Tensor] | None = None,
) -> Result:
    """Attend to M slots: K = e^g K + k s^T, V = e^g V + s v^T, o = V^T softmax(scale K^T q); s and g are [B, T, H, M]."""
    groups = q.shape[2] // k.shape[2]
    k, v, s, g = (_of_heads(x, q.shape[2]) for x in (k, v, s, g))
    keys, values = (
        (None, None) if initial_state is None else (_of_heads(x, q.shape[2], 1) for x in initial_state)
    )
    read, keys = slot_attention(q * scale, k, s, g, keys)
    o, values = linear_attention(read.softmax(-1), s, v, g, values)
    return o, (keys[:, ::groups], values[:, ::groups])


def cyfa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    delta: Tensor,
    beta: Tensor,
    readout: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    q_norm_eps: float,
    k_norm_eps: float,
    scale: float,
    initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Result:
    """K = e^g K + k w^T, V = e^g V + w v^T, o = V^T R^-1 readout^T softmax(scale readout R K^T q).

    Waves of time: w and R turn by the clock, the sum of delta, as FLA's reference turns them. A state is (K, V, clock).
    """
    from fla.ops.cyfa import naive, utils

    keys, values, clock = (None, None, None) if initial_state is None else initial_state
    clocks = delta.cumsum(1) if clock is None else delta.cumsum(1) + clock[:, None]
    turns, waves = clocks.flatten(1), readout.shape[-1] + 1
    with Widen(q.dtype):
        # Not from FLA's cache, which keeps it by device alone, not by dtype.
        table = readout.to(q.dtype) @ utils._readout_basis.__wrapped__(waves, q.device)
        written = beta[..., None] * naive._rotate_atom(turns, waves).view(*clocks.shape, waves)
        q, k = (
            F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
            for x, weight, eps in ((q, q_norm_weight, q_norm_eps), (k, k_norm_weight, k_norm_eps))
        )
        read, keys = linear_attention(q * scale, k, written, g, keys)
        logits = torch.einsum(
            "hrm,bthm->bthr", table, naive._rotate_modal_pos(turns, read.flatten(1, 2), waves).view_as(read)
        )
        weights = torch.einsum("hrm,bthr->bthm", table, logits.softmax(-1))
        weights = naive._rotate_modal_neg(turns, weights.flatten(1, 2), waves).view_as(weights)
        o, values = linear_attention(weights, written, v, g, values)
    return o, (keys, values, clocks[:, -1])


def _of_heads(x: Tensor, heads: int, dim: int = 2) -> Tensor:
    """Return x, repeated along `dim` if it has fewer heads."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)
