"""Mamba 3 on a CPU, by the trapezoidal recurrence of its paper.

    S_t = e_t S_(t-1) + dt_t (s_t b_t x_t^T + (1 - s_t) e_t b_(t-1) x_(t-1)^T),     y_t = S_t^T c_t + D x_t

with e_t = exp(dt_t a_t), s_t = sigmoid(trap_t), and b and c turned by the angles so far, the sum of pi dt_t tanh(angle_t).
Pairs are turned: with one rank neighbours, 2i and 2i + 1, with several i and i + N / 2. FLA calls kernels of mamba_ssm for
it, which need a GPU; tests compare with the quadratic form that mamba_ssm's own tests of its kernels are written in.
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
    *, Q: torch.Tensor, K: torch.Tensor, Q_bias: torch.Tensor, K_bias: torch.Tensor, **given: Any
) -> torch.Tensor:
    """As `mamba3_siso_combined`, with Q, K [B, T, G, N], biases [H, N]; returns [B, T, H, P]."""
    return _combined(
        Q=Q[:, :, None],
        K=K[:, :, None],
        Q_bias=Q_bias[:, None],
        K_bias=K_bias[:, None],
        neighbours=True,
        **given,
    ).squeeze(2)


def mimo(**given: Any) -> torch.Tensor:
    """As `mamba3_mimo_combined`, but for states."""
    return _combined(neighbours=False, **given)


def _combined(
    *,
    neighbours: bool,
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
    MIMO_* [H, R, P]. `neighbours`: which pairs are turned.
    """
    out_dtype, dtype, heads = V.dtype, accumulation_dtype(Q, K, V, ADT), V.shape[2]
    adt, dt, trap, angles = (x.to(dtype) for x in (ADT.mT, DT.mT, Trap.mT.sigmoid(), Angles))
    c, b = (
        x.to(dtype).repeat_interleave(heads // x.shape[3], 3) + bias.transpose(0, 1)
        for x, bias in ((Q, Q_bias), (K, K_bias))
    )
    x = V.to(dtype)[:, :, None] * (1 if MIMO_V is None else MIMO_V.transpose(0, 1))  # [B, T, R, H, P]
    inputs = dict(x=x, adt=adt, dt=dt, trap=trap, angles=angles, b=b, c=c)
    (y,) = by_sequence(lambda part, _: (_scan(**part, neighbours=neighbours),), inputs, {}, cu_seqlens)
    y = y + D[:, None] * x
    if Z is not None:
        y = y * F.silu(Z.to(dtype)[:, :, None] * (1 if MIMO_Z is None else MIMO_Z.transpose(0, 1)))
    return (y if MIMO_Out is None else (y * MIMO_Out.transpose(0, 1)).sum(2)).to(out_dtype)


def _scan(x, adt, dt, trap, angles, b, c, neighbours):
    """Return what each rank of queries c [B, T, R, H, N] reads of the states of one sequence, which all ranks write."""
    so_far = (math.pi * dt[..., None] * angles.tanh()).cumsum(1)[:, :, None]  # [B, T, 1, H, A]
    b, c = _turned(b, so_far, neighbours), _turned(c, so_far, neighbours)
    now, before = dt * trap, dt * (1 - trap) * adt.exp()
    # What is read is a sum over what is written, of R ranks twice: so each of these is a head of its own.
    values = torch.cat([now[:, :, None, :, None] * x, before[:, :, None, :, None] * _before(x)], 2)
    keys = torch.cat([b, _before(b)], 2)
    ranks, written = c.shape[2], keys.shape[2]

    def heads(x, dim):  # [B, T, ranks, written, H, ...] as [B, T, heads, ...]
        return x.unsqueeze(dim).expand(*x.shape[:2], ranks, written, *x.shape[3:]).flatten(2, 4)

    decay = adt[:, :, None].expand(-1, -1, ranks * written, -1).flatten(2)
    y, _ = linear_attention(heads(c, 3), heads(keys, 2), heads(values, 2), decay)
    return y.unflatten(2, (ranks, written, -1)).sum(3)


def _before(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, ...] of the token before; zeros for the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def _turned(x: torch.Tensor, angles: torch.Tensor, neighbours: bool) -> torch.Tensor:
    """Turn the first A pairs of x [..., N] by angles [..., A], 2 A <= N: 2i and 2i + 1, or i and i + N / 2."""
    pairs, at = (-1, 2) if neighbours else (2, -1), -1 if neighbours else -2
    one, other = x.unflatten(-1, pairs).unbind(at)
    angles = F.pad(angles, (0, one.shape[-1] - angles.shape[-1]))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([one * cos - other * sin, one * sin + other * cos], at).flatten(-2)


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
    """As `Mamba3.forward` on a GPU, but that a cache holds the hidden states [B, T, D] so far: all is computed again."""
    from fla.layers.utils import get_layer_cache, repad_hidden_states, unpad_hidden_states, update_layer_cache

    m: Any = mixer
    last_state, length = get_layer_cache(m, past_key_values), hidden_states.shape[1]
    if last_state is not None:
        hidden_states = torch.cat([last_state["recurrent_state"], hidden_states], 1)
    batch, so_far = hidden_states.shape[:2]
    packed, indices, bounds = unpad_hidden_states(
        hidden_states,
        cu_seqlens,  # pyrefly: ignore[bad-argument-type]  # int64, if not typed so
        attention_mask,
        so_far,
    )
    output, _ = m.cuda_kernels_forward(packed, None, False, bounds)
    update_layer_cache(m, past_key_values, recurrent_state=hidden_states, offset=length)
    return repad_hidden_states(output, indices, batch, so_far)[:, -length:], None, past_key_values
