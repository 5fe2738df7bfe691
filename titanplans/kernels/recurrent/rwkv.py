"""RWKV-6's and RWKV-7's operators on a CPU: recurrences, the token shift, and pointwise kernels.

    RWKV-6   S_t = exp(w_t) S_(t-1) + k_t v_t^T                              o_t = r_t^T (S_(t-1) + u k_t v_t^T)
    RWKV-7   S_t = exp(w_t) S_(t-1) + b_t (a_t^T S_(t-1)) + k_t v_t^T        o_t = r_t^T S_t

with S [K, V] for each head, by chunks. FLA's references, `recurrent_naive.py` of RWKV-6 and `dplr/naive.py`, loop over time.
"""

from collections.abc import Callable
from typing import Any

import torch

from titanplans.kernels.layers.packing import Result, by_sequence, sequences
from titanplans.kernels.precision import accumulation_dtype
from titanplans.kernels.recurrent.chunks import linear_attention


def rwkv6(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **split_of_work: Any,
) -> Result:
    """RWKV-6 of r, k, w [B, T, H, K], v [B, T, H, V] and the bonus u [H, K]; states are [N, H, K, V]."""
    given = dict(r=r, k=k, v=v, w=w, bonus=u.expand(*r.shape[:2], *u.shape))
    return _recurrence(_rwkv6, given, scale, initial_state, output_final_state, cu_seqlens)


def rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **split_of_work: Any,
) -> Result:
    """RWKV-7 of r, w, k, a, b [B, T, H, K] and v [B, T, H, V]; states are [N, H, K, V]."""
    given = dict(r=r, w=w, k=k, v=v, a=a, b=b)
    return _recurrence(_rwkv7, given, scale, initial_state, output_final_state, cu_seqlens)


def rwkv7_mul(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kk: torch.Tensor,
    a: torch.Tensor,
    *options: Any,
    **more: Any,
) -> Result:
    """`rwkv7` with a = -kk and b = kk * a."""
    return rwkv7(r, w, k, v, -kk, kk * a, *options, **more)


def _recurrence(
    run: Callable[..., Result],
    given: dict[str, torch.Tensor],
    scale: float | None,
    state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
) -> Result:
    dtype, out_dtype = accumulation_dtype(*given.values(), state), given["v"].dtype
    inputs = {name: x.to(dtype) for name, x in given.items()}
    inputs["r"] = inputs["r"] * (inputs["r"].shape[-1] ** -0.5 if scale is None else scale)
    states = {"state": None if state is None else state.to(dtype)}
    o, final = by_sequence(lambda part, states: run(**part, **states), inputs, states, cu_seqlens)
    return o.to(out_dtype), final if output_final_state else None


def _rwkv6(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    bonus: torch.Tensor,
    state: torch.Tensor | None,
) -> Result:
    """A token reads what the one before it left: so that one is given its query."""
    first = torch.zeros_like(v[:, :1]) if state is None else torch.einsum("bthk,bhkv->bthv", r[:, :1], state)
    o, final = linear_attention(torch.cat([r[:, 1:], r[:, :1]], 1), k, v, w, state)
    own = (r * bonus * k).sum(-1, keepdim=True) * v
    return torch.cat([first, o[:, :-1]], 1) + own, final


def _rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor | None,
) -> Result:
    return linear_attention(r, k, v, w, state, a=a, b=b)


def token_shift(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The token before less each token, of x [B, T, D], and the last tokens [N, D]; `cache` [N, D] came before the first."""

    deltas, lasts = [], []
    for n, part in sequences({"x": x}, cu_seqlens):
        own, before = part["x"], None if cache is None else cache if n is None else cache[n : n + 1]
        first = torch.zeros_like(own[:, :1]) if before is None else before.view_as(own[:, :1]).to(x.dtype)
        deltas.append(torch.cat([first, own[:, :-1]], 1) - own)
        lasts.append(own[:, -1])
    return torch.cat(deltas, 1), torch.cat(lasts) if output_cache else None


def addcmul(hidden_states: torch.Tensor, delta: torch.Tensor, *weights: torch.Tensor | None) -> Any:
    """hidden_states + delta * weight for each weight; None stays None."""
    return tuple(None if w is None else torch.addcmul(hidden_states, delta, w) for w in weights)


def k_update(k: torch.Tensor, a: torch.Tensor, ka: torch.Tensor, *split_of_work: Any) -> torch.Tensor:
    """k (1 + (a - 1) ka)."""
    return k.addcmul(k * (a - 1), ka)


def gate_output_correction(
    o: torch.Tensor, r: torch.Tensor, k: torch.Tensor, r_k: torch.Tensor, v: torch.Tensor, g: torch.Tensor
) -> torch.Tensor:
    """(o + (sum of r k r_k) v) g of r, k, v [B, T, H, D], r_k [H, D] and o, g [B, T, H D]."""
    return (o + ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(-2)) * g
