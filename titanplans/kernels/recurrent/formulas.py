"""The formulas of FLA's recurrent kernels, computed by `chunks`. `recurrence` adapts them to the kernels' signatures.

Inputs are [B, T, H, ...] of one dtype, where q and k may have fewer heads than v. Initial states are [B, H, ...] or None.
Each function returns outputs [B, T, H, V] and the final states. Parameters have the names of the kernels' parameters. FLA's
references, fla/ops/*/naive.py, are not used, since they loop over tokens. Tests compare with the formulas in the docstrings.
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
    """S = diag(e^g) S + k v^T, o = scale S^T q (Yang et al. 2023, arXiv:2312.06635, eq. 3); g or gk is [B, T, H, K]."""
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
    k_write: Tensor | None = None,
) -> Result:
    """S = e^g S; then S = S + k_write (beta (v - S^T k))^T, o = scale S^T q; k_write is k by default.

    g is [B, T, H], or [B, T, H, K] for KDA.
    """
    q, k, k_write = (_repeat_heads(x, v.shape[2]) for x in (q, k, k if k_write is None else k_write))
    write = k_write * beta[..., None]
    # The state that k reads has decayed already.
    read = -k if g is None else -k * (g if g.dim() == 4 else g[..., None]).exp()
    return linear_attention(q * scale, write, v, g, initial_state, a=read, b=write)


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
    """S = e^g S + k (beta (v - S^T p))^T, o = scale S^T q; p is k by default.

    The S that p reads has not decayed yet, as in FLA's kernels and in `naive_chunk_comba`. In `naive_recurrent_comba` it
    has.
    """
    q, k, p = (_repeat_heads(x, v.shape[2]) for x in (q, k, k if p is None else p))
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

    The state decays before the first of these steps, and the query reads it after the last.
    """

    def at_step(x: Tensor, step: int) -> Tensor:
        """Return [B, T num, ...]: x [B, T, ...] at this step of each token, and zeros at the token's other steps."""
        after = num_householder - 1 - step
        return F.pad(x[:, :, None], (*(0, 0) * (x.dim() - 2), step, after)).flatten(1, 2)

    g = None if g is None else at_step(g, 0)
    o, state = delta_rule(at_step(q, num_householder - 1), k, v, beta, scale, g, initial_state)
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
    """The delta rule with k_write = k x^(-r / (1 + |r|)), r = log(A + eps) - log_atk_scale, A = e^g_atk A + beta_atk k^2.

    A is [B, G, K] for G key heads.
    """
    squares, last = scan(beta_atk[..., None] * k.square(), g_atk[..., None], initial_A_state)
    if isinstance(log_atk_scale, Tensor):
        log_atk_scale = log_atk_scale.to(k.dtype)[:, None]
    r = (squares + eps).log() - log_atk_scale
    o, state = delta_rule(q, k, v, beta, scale, g, initial_state, k_write=k * x ** -(r / (1 + r.abs())))
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
    """H = e^g H + beta k k^T, S = e^g S + beta k v^T, o = S^T (H + diag(lamb))^-1 q, solved exactly."""
    write = k * beta[..., None]
    sums, h_kk = scan(write[..., None] * k[..., None, :], g[..., None, None], h_kk_init)
    systems = sums + torch.diag_embed(lamb.to(k.dtype))
    o, h_kv = linear_attention(torch.linalg.solve(systems, q), write, v, g, h_kv_init)
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
    """Softmax attention to keys; every later token t multiplies a key by I - beta_t w_t w_t^T.

    With `use_cache` also return the keys [B, T, H, K] after the last token, for decoding.
    """
    key_heads = k.shape[2]
    q, k, v, w, beta = (_repeat_heads(x, q.shape[2]).transpose(1, 2) for x in (q, k, v, w, beta))
    # coefficients[t, s]: the multiple of w_t that token t subtracts from key s. It depends on the coefficients of the
    # tokens between s and t.
    scaled_w = w * beta[..., None]
    coefficients = torch.linalg.solve_triangular(
        (scaled_w @ w.mT).tril(-1), (scaled_w @ k.mT).tril(-1), upper=False, unitriangular=True
    )
    scores = (q @ k.mT).tril() - (q @ w.mT).tril() @ coefficients
    if g is not None:
        log_decay = g.transpose(1, 2).cumsum(2)
        scores = scores + log_decay[..., None] - log_decay[:, :, None]
    is_later = torch.ones(2 * q.shape[2:3], dtype=torch.bool, device=q.device).triu(1)
    o = (scores * scale).masked_fill(is_later, -torch.inf).softmax(-1) @ v
    if not use_cache:
        return o.transpose(1, 2).contiguous(), None
    last_keys = (k - coefficients.mT @ w).transpose(1, 2)[:, :, :: q.shape[1] // key_heads]
    return o.transpose(1, 2).contiguous(), last_keys


def gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor,
    scale: float,
    initial_state: tuple[Tensor, Tensor] | None = None,
) -> Result:
    """Attention to M slots: K = e^g K + k s^T, V = e^g V + s v^T, o = V^T softmax(scale K^T q); s and g are [B, T, H, M]."""
    groups = q.shape[2] // k.shape[2]
    k, v, s, g = (_repeat_heads(x, q.shape[2]) for x in (k, v, s, g))
    keys, values = (
        (None, None) if initial_state is None else (_repeat_heads(x, q.shape[2], 1) for x in initial_state)
    )
    scores, keys = slot_attention(q * scale, k, s, g, keys)
    o, values = linear_attention(scores.softmax(-1), s, v, g, values)
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

    w and R are rotated by the clock, the cumulative sum of delta, as in FLA's reference. A state is (K, V, clock).
    """
    from fla.ops.cyfa import naive, utils

    keys, values, clock = (None, None, None) if initial_state is None else initial_state
    clocks = delta.cumsum(1) if clock is None else delta.cumsum(1) + clock[:, None]
    turns, waves = clocks.flatten(1), readout.shape[-1] + 1
    with Widen(q.dtype):
        # `__wrapped__` bypasses FLA's cache, whose key is the device without the dtype.
        table = readout.to(q.dtype) @ utils._readout_basis.__wrapped__(waves, q.device)
        write = beta[..., None] * naive._rotate_atom(turns, waves).view(*clocks.shape, waves)
        q, k = (
            F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
            for x, weight, eps in ((q, q_norm_weight, q_norm_eps), (k, k_norm_weight, k_norm_eps))
        )
        read, keys = linear_attention(q * scale, k, write, g, keys)
        logits = torch.einsum(
            "hrm,bthm->bthr", table, naive._rotate_modal_pos(turns, read.flatten(1, 2), waves).view_as(read)
        )
        weights = torch.einsum("hrm,bthr->bthm", table, logits.softmax(-1))
        weights = naive._rotate_modal_neg(turns, weights.flatten(1, 2), waves).view_as(weights)
        o, values = linear_attention(weights, write, v, g, values)
    return o, (keys, values, clocks[:, -1])


def _repeat_heads(x: Tensor, heads: int, dim: int = 2) -> Tensor:
    """Return x with `heads` heads, repeated along `dim` if it has fewer."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)
