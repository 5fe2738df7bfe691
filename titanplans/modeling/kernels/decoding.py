"""Kernels for one token, by what stands for those of a sequence, or by FLA's own reference."""

from typing import Any

import torch

from titanplans.modeling.kernels.packing import Result
from titanplans.modeling.kernels.precision import accumulation_dtype
from titanplans.proof.modes import Widen


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
    wide = (x if x is None else x.to(dtype) for x in (q, k, v, g))
    with torch.autocast(q.device.type, enabled=False), Widen(dtype):
        return naive_attn_decoding(*wide, scale, cu_seqlens, do_gate_scale, **options).to(v.dtype)
