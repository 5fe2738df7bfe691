"""CPU replacements for the kernels of RWKV-6 and RWKV-7: recurrences, the token shift, and pointwise kernels.

    RWKV-6   S_t = exp(w_t) S_(t-1) + k_t v_t^T                              o_t = r_t^T (S_(t-1) + u k_t v_t^T)
    RWKV-7   S_t = exp(w_t) S_(t-1) + b_t (a_t^T S_(t-1)) + k_t v_t^T        o_t = r_t^T S_t

Each head has a state S [K, V]; inputs are [B, T, H, ...]. FLA's references, `recurrent_naive.py` of RWKV-6 and
`dplr/naive.py`, are not used, since they loop over tokens.
"""

from typing import Any

import torch

from titanplans.kernels.layers.packing import Result, sequences
from titanplans.kernels.recurrent.chunks import linear_attention


def rwkv6(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None = None,
) -> Result:
    """Return the outputs and final state of RWKV-6 with the bonus u [H, K]."""
    r = r * scale
    # The output uses the state before its token, so queries are shifted by one token.
    o, final = linear_attention(torch.cat([r[:, 1:], r[:, :1]], 1), k, v, w, initial_state)
    first = torch.zeros_like(v[:, :1])
    if initial_state is not None:
        first = torch.einsum("bthk,bhkv->bthv", r[:, :1], initial_state)
    bonus = (r * u * k).sum(-1, keepdim=True) * v
    return torch.cat([first, o[:, :-1]], 1) + bonus, final


def rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None = None,
) -> Result:
    """Return the outputs and final state of RWKV-7."""
    return linear_attention(r * scale, k, v, w, initial_state, a=a, b=b)


def rwkv7_mul(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kk: torch.Tensor,
    a: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None = None,
) -> Result:
    """Return `rwkv7` with a = -kk and b = kk a."""
    return rwkv7(r, w, k, v, -kk, kk * a, scale, initial_state)


def token_shift(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x_(t-1) - x_t of x [B, T, D], and the last tokens [N, D] or None. `cache` [N, D] has the tokens before x."""
    deltas, lasts = [], []
    for n, sequence in sequences({"x": x}, cu_seqlens):
        x_n, before = sequence["x"], None if cache is None else cache if n is None else cache[n : n + 1]
        first = torch.zeros_like(x_n[:, :1]) if before is None else before.view_as(x_n[:, :1]).to(x.dtype)
        deltas.append(torch.cat([first, x_n[:, :-1]], 1) - x_n)
        lasts.append(x_n[:, -1])
    return torch.cat(deltas, 1), torch.cat(lasts) if output_cache else None


def addcmul(hidden_states: torch.Tensor, delta: torch.Tensor, *weights: torch.Tensor | None) -> Any:
    """Return hidden_states + delta * weight for each weight; None for a weight of None."""
    return tuple(None if w is None else torch.addcmul(hidden_states, delta, w) for w in weights)


def k_update(k: torch.Tensor, a: torch.Tensor, ka: torch.Tensor, *split_of_work: Any) -> torch.Tensor:
    """Return k (1 + (a - 1) ka)."""
    return k.addcmul(k * (a - 1), ka)


def gate_output_correction(
    o: torch.Tensor, r: torch.Tensor, k: torch.Tensor, r_k: torch.Tensor, v: torch.Tensor, g: torch.Tensor
) -> torch.Tensor:
    """Return (o + sum_d(r k r_k) v) g, where r, k, v are [B, T, H, D], r_k [H, D], and o, g [B, T, H D]."""
    return (o + ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(-2)) * g
