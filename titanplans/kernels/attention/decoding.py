"""Kernels for one token, by what stands for those of a sequence, or by FLA's own reference."""

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
    """Return output [B, H, V] and states [B, H, K, K], [B, H, K, V] after one token: q, k [B, H, K], v [B, H, V].

    By the reference of a sequence, which solves the system exactly.
    """
    from fla.ops.mesa_net import chunk_mesa_net  # the stand-in

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
    """Return Parallax of q, r [B, Tq, H, D], the last of T tokens, over k, v [B, T, H_kv, D]: [B, Tq, H, D].

    Args:
        q: queries.
        r: second queries.
        k: keys.
        v: values.
        scale: of the first scores.
        window_size: keys that a query sees.
        cache_start: [B], the first key of each sequence that is no padding; queries before it return zeros.
    """
    from fla.ops.parallax.parallel import parallel_parallax

    starts = [0] * len(q) if cache_start is None else cache_start.tolist()
    outputs = []
    for n, start in enumerate(starts):
        count = min(q.shape[1], k.shape[1] - start)
        one = slice(n, n + 1)
        o = parallel_parallax(
            q[one, -count:], r[one, -count:], k[one, start:], v[one, start:], scale, window_size
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
    """Return Wall attention of q [B, Tq, H, K], the last of T tokens, over a cache, and the log2 of its sums [B, Tq, H].

    As the kernel does, queries are rounded to the dtype of the cached keys.

    Args:
        q: queries.
        v: values [B, T, H_kv, V].
        p_curr: sums of the log2 decays up to each query, [B, Tq, H, K].
        k_tilde: keys, decayed from the beginning of their chunk, [B, T, H, K].
        r_cache: sums of the log2 decays up to the beginning of each chunk, [B, chunks, H, K].
        sink_bias: [H], or None.
        scale: of the scores.
        cache_chunk_size: tokens of a chunk.
        g_scalar_cumsum: sums of the heads' log2 decays, [B, T, H], or None.
        window_size: keys that a query sees.
    """
    dtype = accumulation_dtype(q, v, p_curr)
    to_log2 = 1.4426950216  # as the kernel has it
    length = v.shape[1]
    anchors = r_cache.to(dtype).repeat_interleave(cache_chunk_size, 1)[:, :length]
    key = torch.arange(length, device=q.device)
    query = key[length - q.shape[1] :, None]
    seen = key <= query
    if window_size is not None:
        seen &= query - key < window_size
    # Chunks that begin behind a query are not seen, and would overflow.
    decay = (p_curr.to(dtype)[:, :, None] - anchors[:, None]).masked_fill(~seen[..., None, None], 0).exp2()
    decayed = (q.to(dtype)[:, :, None] * decay).to(k_tilde.dtype).to(dtype)  # [B, Tq, T, H, K]
    scores = (decayed * k_tilde.to(dtype)[:, None]).sum(-1) * (scale * to_log2)
    if g_scalar_cumsum is not None:
        sums = g_scalar_cumsum.to(dtype)
        scores = scores + sums[:, length - q.shape[1] :, None] - sums[:, None]
    scores = scores.masked_fill(~seen[..., None], -torch.inf)
    total = scores * (log_2 := 0.6931471805599453)
    if sink_bias is not None:
        total = torch.cat((total, sink_bias.to(dtype).expand(*total.shape[:2], 1, -1)), 2)
    norm = total.logsumexp(2)
    weights = (scores * log_2 - norm[:, :, None]).exp()
    v = v.to(dtype).repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bijh,bjhd->bihd", weights, v).to(q.dtype), norm / log_2
