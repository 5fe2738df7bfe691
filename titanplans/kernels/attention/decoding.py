"""CPU replacements for decoding steps: one new token of a sequence."""

from typing import Any

import torch
import torch.nn.functional as F

from titanplans.kernels.layers.packing import Result
from titanplans.kernels.precision import accumulation_dtype, without_autocast
from titanplans.kernels.widen import Widen


def mesa_net_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    lamb: torch.Tensor,
    beta: torch.Tensor,
    prev_h_kk: torch.Tensor,
    prev_h_kv: torch.Tensor,
    max_CG_iteration: int = 30,
) -> Result:
    """Return the output [B, H, V] and states [B, H, K, K], [B, H, K, V] after one token: q, k [B, H, K], v [B, H, V].

    This calls the replacement for a sequence, which solves the system exactly.
    """
    from fla.ops.mesa_net import chunk_mesa_net  # replaced by `formulas.mesa_net`

    q, k, v, g, beta = (x[:, None] for x in (q, k, v, g, beta))
    o, h_kk, h_kv = chunk_mesa_net(
        q, k, v, g, beta, lamb, h_kk_init=prev_h_kk, h_kv_init=prev_h_kv, output_final_state=True
    )
    return o[:, 0], h_kk, h_kv


def attn_decoding_one_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    do_gate_scale: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Return the attention [1, N, HQ, V] of one query [1, N, HQ, K] for each of N packed sequences."""
    from fla.ops.attn.naive import naive_attn_decoding

    dtype = accumulation_dtype(q, k, v, g)
    options |= {"scale": scale, "cu_seqlens": cu_seqlens, "do_gate_scale": do_gate_scale}
    with without_autocast(q), Widen(dtype):
        gates = None if g is None else g.to(dtype)
        return naive_attn_decoding(q.to(dtype), k.to(dtype), v.to(dtype), gates, **options).to(v.dtype)


def parallax_decode(
    q: torch.Tensor,
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    window_size: int | None = None,
    cache_start: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return Parallax attention [B, Tq, H, D] of the last Tq of T tokens.

    Args:
        q: queries [B, Tq, H, D].
        r: second queries [B, Tq, H, D].
        k: keys [B, T, H_kv, D].
        v: values [B, T, H_kv, D].
        scale: factor of the scores of `q`.
        window_size: number of keys that a query attends to.
        cache_start: [B], the first key of each sequence after padding. Outputs of earlier queries are zero.
    """
    from fla.ops.parallax.parallel import parallel_parallax

    starts = [0] * len(q) if cache_start is None else cache_start.tolist()
    outputs = []
    for n, start in enumerate(starts):
        count = min(q.shape[1], k.shape[1] - start)
        row = slice(n, n + 1)
        o = parallel_parallax(
            q[row, -count:], r[row, -count:], k[row, start:], v[row, start:], scale, window_size
        )
        outputs.append(F.pad(o, (0, 0, 0, 0, q.shape[1] - count, 0)))
    return torch.cat(outputs)


def parallel_wall_attn_decode(
    q: torch.Tensor,
    v: torch.Tensor,
    p_curr: torch.Tensor,
    k_tilde: torch.Tensor,
    r_cache: torch.Tensor,
    sink_bias: torch.Tensor | None,
    scale: float,
    cache_chunk_size: int,
    g_scalar_cumsum: torch.Tensor | None = None,
    window_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Wall attention [B, Tq, H, V] of the last Tq of T tokens, and the base-2 logsumexp of the scores [B, Tq, H].

    Queries are rounded to the dtype of the cached keys, as in the kernel.

    Args:
        q: queries [B, Tq, H, K].
        v: values [B, T, H_kv, V].
        p_curr: cumulative log2 decays up to each query, [B, Tq, H, K].
        k_tilde: keys, decayed from the beginning of their chunk, [B, T, H, K].
        r_cache: cumulative log2 decays up to the beginning of each chunk, [B, chunks, H, K].
        sink_bias: [H], or None.
        scale: factor of the scores.
        cache_chunk_size: tokens per chunk.
        g_scalar_cumsum: cumulative log2 decays of each head, [B, T, H], or None.
        window_size: number of keys that a query attends to.
    """
    dtype = accumulation_dtype(q, v, p_curr)
    to_log2 = 1.4426950216  # the kernel's constant
    length = v.shape[1]
    chunk_begins = r_cache.to(dtype).repeat_interleave(cache_chunk_size, 1)[:, :length]
    key = torch.arange(length, device=q.device)
    query = key[length - q.shape[1] :, None]
    mask = key <= query
    if window_size is not None:
        mask &= query - key < window_size
    # Mask before the exponential, which would overflow for chunks that begin after the query.
    decay = (
        (p_curr.to(dtype)[:, :, None] - chunk_begins[:, None]).masked_fill(~mask[..., None, None], 0).exp2()
    )
    decayed = (q.to(dtype)[:, :, None] * decay).to(k_tilde.dtype).to(dtype)  # [B, Tq, T, H, K]
    scores = (decayed * k_tilde.to(dtype)[:, None]).sum(-1) * (scale * to_log2)
    if g_scalar_cumsum is not None:
        sums = g_scalar_cumsum.to(dtype)
        scores = scores + sums[:, length - q.shape[1] :, None] - sums[:, None]
    scores = scores.masked_fill(~mask[..., None], -torch.inf)
    logits = scores * (log_2 := 0.6931471805599453)
    if sink_bias is not None:
        logits = torch.cat((logits, sink_bias.to(dtype).expand(*logits.shape[:2], 1, -1)), 2)
    norm = logits.logsumexp(2)
    weights = (scores * log_2 - norm[:, :, None]).exp()
    v = v.to(dtype).repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bijh,bjhd->bihd", weights, v).to(q.dtype), norm / log_2
