"""Mamba 3 on a CPU, by the trapezoidal recurrence of its paper.

    S_t = e_t S_(t-1) + dt_t (s_t b_t x_t^T + (1 - s_t) e_t b_(t-1) x_(t-1)^T),     y_t = S_t^T c_t + D x_t

with e_t = exp(dt_t a_t), s_t = sigmoid(trap_t), and b and c turned by the angles so far, the sum of dt_t angle_t, in
pairs of neighbours. FLA calls kernels of mamba_ssm for it, which need a GPU. They are not compared with this: it serves to
prove plans, for which heads are what counts, not to train what is then used with the kernels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titanplans.errors import KernelError
from titanplans.modeling.kernels.precision import accumulation_dtype
from titanplans.modeling.kernels.state_space import recurrence


def siso(
    *, Q: torch.Tensor, K: torch.Tensor, Q_bias: torch.Tensor, K_bias: torch.Tensor, **given: Any
) -> torch.Tensor:
    """As `mamba3_siso_combined`, with Q, K [B, T, G, N], biases [H, N]; returns [B, T, H, P]."""
    return mimo(
        Q=Q[:, :, None], K=K[:, :, None], Q_bias=Q_bias[:, None], K_bias=K_bias[:, None], **given
    ).squeeze(2)


def mimo(
    *,
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
    **options: Any,
) -> torch.Tensor:
    """As `mamba3_mimo_combined`.

    Q, K [B, T, R, G, N]; V, Z [B, T, H, P]; ADT, DT, Trap [B, H, T]; biases [H, R, N]; Angles [B, T, H, A];
    MIMO_* [H, R, P]. Returns [B, T, H, P], or [B, T, R, H, P] without MIMO_Out.

    Raises:
        KernelError: packed sequences, or states for decoding.
    """
    if cu_seqlens is not None or options.get("return_state") or options.get("return_final_states"):
        what = "use_cache = True" if cu_seqlens is None else "cu_seqlens"
        raise KernelError(f"mamba3: {what} is not computed on a CPU; leave it out or run on a GPU")
    out_dtype, dtype = V.dtype, accumulation_dtype(Q, K, V, ADT)
    adt, dt, trap = (x.to(dtype).transpose(1, 2) for x in (ADT, DT, Trap.sigmoid()))
    turned = (dt[..., None] * Angles.to(dtype)).cumsum(1)[:, :, None]  # [B, T, 1, H, A]
    heads = V.shape[2]
    c, b = (
        _turned(x.to(dtype).repeat_interleave(heads // x.shape[3], 3) + bias.transpose(0, 1), turned)
        for x, bias in ((Q, Q_bias), (K, K_bias))
    )
    x = V.to(dtype)[:, :, None] * (1 if MIMO_V is None else MIMO_V.transpose(0, 1))  # [B, T, R, H, P]
    y = torch.stack([_of_rank(x, adt, dt, trap, b, one) for one in c.unbind(2)], 2) + D[:, None] * x
    if Z is not None:
        y = y * F.silu(Z.to(dtype)[:, :, None] * (1 if MIMO_Z is None else MIMO_Z.transpose(0, 1)))
    return (y if MIMO_Out is None else (y * MIMO_Out.transpose(0, 1)).sum(2)).to(out_dtype)


def _of_rank(x, adt, dt, trap, b, c):
    """Return what one rank of queries c [B, T, H, N] reads of the states that all ranks of b and x write."""
    now, before = (dt * trap)[..., None], (dt * (1 - trap) * adt.exp())[..., None]
    y = torch.zeros_like(x[:, :, 0])
    for bi, xi in zip(b.unbind(2), x.unbind(2), strict=True):
        y = y + recurrence(now * xi, adt, bi, c)[0] + recurrence(before * _before(xi), adt, _before(bi), c)[0]
    return y


def _before(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, ...] of the token before; zeros for the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn pairs of neighbours of the first part of x [..., N] by angles [..., A], 2 A <= N."""
    size = 2 * angles.shape[-1]
    even, odd = x[..., :size].unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([pairs.flatten(-2), x[..., size:]], -1)


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
    """As `Mamba3.forward` on a GPU, but for caches, packed sequences and padding."""
    if attention_mask is not None and not attention_mask.all():
        raise KernelError("mamba3: padding is not computed on a CPU; leave it out or run on a GPU")
    m: Any = mixer
    output, _ = m.cuda_kernels_forward(hidden_states, None, bool(use_cache), cu_seqlens)
    return output, None, past_key_values
