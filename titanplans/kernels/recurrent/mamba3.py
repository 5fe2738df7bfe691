"""CPU replacement for Mamba 3, with the trapezoidal recurrence of its paper.

    S_t = e_t S_(t-1) + dt_t (s_t b_t x_t^T + (1 - s_t) e_t b_(t-1) x_(t-1)^T),     y_t = S_t^T c_t + D x_t

with e_t = exp(dt_t a_t) and s_t = sigmoid(trap_t). b and c are rotated by the cumulative sum of pi dt_t tanh(angle_t), in
pairs of channels: (2i, 2i + 1) with one rank (SISO), (i, i + N / 2) with several (MIMO). A rank here is one of the R inputs
and outputs of a head, not a process. FLA calls kernels of mamba_ssm, which need a GPU. Tests compare with the quadratic form
in mamba_ssm's tests.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titanplans.kernels.layers.packing import by_sequence
from titanplans.kernels.precision import accumulation_dtype
from titanplans.kernels.recurrent.chunks import linear_attention


def siso(
    *, Q: torch.Tensor, K: torch.Tensor, Q_bias: torch.Tensor, K_bias: torch.Tensor, **arguments: Any
) -> torch.Tensor:
    """Return `mamba3_siso_combined` [B, T, H, P] of Q, K [B, T, G, N] and biases [H, N]."""
    return _combined(
        Q=Q[:, :, None],
        K=K[:, :, None],
        Q_bias=Q_bias[:, None],
        K_bias=K_bias[:, None],
        interleaved=True,
        **arguments,
    ).squeeze(2)


def mimo(**arguments: Any) -> torch.Tensor:
    """Return the output of `mamba3_mimo_combined`, without states."""
    return _combined(interleaved=False, **arguments)


def _combined(
    *,
    interleaved: bool,
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    ADT: torch.Tensor,
    DT: torch.Tensor,
    Trap: torch.Tensor,
    Q_bias: torch.Tensor,
    K_bias: torch.Tensor,
    Angles: torch.Tensor,
    D: torch.Tensor,
    Z: torch.Tensor | None,
    MIMO_V: torch.Tensor | None = None,
    MIMO_Z: torch.Tensor | None = None,
    MIMO_Out: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **split_of_work: Any,
) -> torch.Tensor:
    """Return [B, T, H, P], or [B, T, R, H, P] without MIMO_Out.

    Q, K [B, T, R, G, N]; V, Z [B, T, H, P]; ADT, DT, Trap [B, H, T]; biases [H, R, N]; Angles [B, T, H, A];
    MIMO_* [H, R, P]. `interleaved`: rotate pairs (2i, 2i + 1) instead of (i, i + N / 2).
    """
    out_dtype, dtype, heads = V.dtype, accumulation_dtype(Q, K, V, ADT), V.shape[2]
    adt, dt, trap, angles = (x.to(dtype) for x in (ADT.mT, DT.mT, Trap.mT.sigmoid(), Angles))
    c, b = (
        x.to(dtype).repeat_interleave(heads // x.shape[3], 3) + bias.transpose(0, 1)
        for x, bias in ((Q, Q_bias), (K, K_bias))
    )
    x = V.to(dtype)[:, :, None] * (1 if MIMO_V is None else MIMO_V.transpose(0, 1))  # [B, T, R, H, P]
    inputs = dict(x=x, adt=adt, dt=dt, trap=trap, angles=angles, b=b, c=c)
    (y,) = by_sequence(lambda batch, _: (_scan(**batch, interleaved=interleaved),), inputs, {}, cu_seqlens)
    y = y + D[:, None] * x
    if Z is not None:
        y = y * F.silu(Z.to(dtype)[:, :, None] * (1 if MIMO_Z is None else MIMO_Z.transpose(0, 1)))
    return (y if MIMO_Out is None else (y * MIMO_Out.transpose(0, 1)).sum(2)).to(out_dtype)


def _scan(x, adt, dt, trap, angles, b, c, interleaved):
    """Return the outputs [B, T, R, H, P] of each rank of queries c [B, T, R, H, N]. The ranks of keys add to one state."""
    rotation = (math.pi * dt[..., None] * angles.tanh()).cumsum(1)[:, :, None]  # [B, T, 1, H, A]
    b, c = _rotate(b, rotation, interleaved), _rotate(c, rotation, interleaved)
    current, previous = dt * trap, dt * (1 - trap) * adt.exp()
    # The output is linear in the state. The state is linear in its 2 R writes per token: R ranks of the current token, and
    # R ranks of the previous token. So each pair of a query rank and a write is one head of linear attention, and the
    # heads are summed.
    values = torch.cat([current[:, :, None, :, None] * x, previous[:, :, None, :, None] * _shift(x)], 2)
    keys = torch.cat([b, _shift(b)], 2)
    ranks, writes = c.shape[2], keys.shape[2]

    def heads(x, dim):  # [B, T, ranks or writes, H, ...] -> [B, T, ranks * writes * H, ...]
        return x.unsqueeze(dim).expand(*x.shape[:2], ranks, writes, *x.shape[3:]).flatten(2, 4)

    decay = adt[:, :, None].expand(-1, -1, ranks * writes, -1).flatten(2)
    y, _ = linear_attention(heads(c, 3), heads(keys, 2), heads(values, 2), decay)
    return y.unflatten(2, (ranks, writes, -1)).sum(3)


def _shift(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, ...], shifted by one token, with zeros for the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def _rotate(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first A pairs of channels of x [..., N] by angles [..., A]: (2i, 2i + 1), or (i, i + N / 2)."""
    pairs, dim = (-1, 2) if interleaved else (2, -1), -1 if interleaved else -2
    first, second = x.unflatten(-1, pairs).unbind(dim)
    angles = F.pad(angles, (0, first.shape[-1] - angles.shape[-1]))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim).flatten(-2)


def mamba3_forward(
    mixer: nn.Module,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    output_attentions: bool | None = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None, Any]:
    """Replace `Mamba3.forward`. The cache has all earlier hidden states [B, T, D], and each call runs on all of them."""
    from fla.layers.utils import get_layer_cache, repad_hidden_states, unpad_hidden_states, update_layer_cache

    m: Any = mixer
    last_state, length = get_layer_cache(m, past_key_values), hidden_states.shape[1]
    if last_state is not None:
        hidden_states = torch.cat([last_state["recurrent_state"], hidden_states], 1)
    batch, total_length = hidden_states.shape[:2]
    packed, indices, bounds = unpad_hidden_states(
        hidden_states,
        cu_seqlens,  # pyrefly: ignore[bad-argument-type]  # an int64 tensor; FLA's annotation differs
        attention_mask,
        total_length,
    )
    output, _ = m.cuda_kernels_forward(packed, None, False, bounds)
    update_layer_cache(m, past_key_values, recurrent_state=hidden_states, offset=length)
    return repad_hidden_states(output, indices, batch, total_length)[:, -length:], None, past_key_values
