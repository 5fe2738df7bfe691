"""MesaNet's kernel for one token, by the reference of its kernel for a sequence."""

import torch

from titanplans.modeling.kernels.packing import Result


def one_step(
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

    The system is solved exactly, as for a sequence.
    """
    from fla.ops.mesa_net import chunk_mesa_net

    q, k, v, g, beta = (x[:, None] for x in (q, k, v, g, beta))
    o, h_kk, h_kv = chunk_mesa_net(
        q, k, v, g, beta, lamb, h_kk_init=prev_h_kk, h_kv_init=prev_h_kv, output_final_state=True
    )
    return o[:, 0], h_kk, h_kv
