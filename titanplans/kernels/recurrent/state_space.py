"""CPU replacements for Mamba and Mamba 2: their scans, and the forward of their mixers.

    Mamba     h_t = exp(dt_t a) h_(t-1) + dt_t b_t x_t        y_t = h_t^T c_t      h [N], for each channel
    Mamba 2   S_t = exp(dt_t a) S_(t-1) + dt_t b_t x_t^T      y_t = S_t^T c_t      S [N, P], for each head

FLA's PyTorch versions are not used. `Mamba.slow_forward` loops over tokens, and its convolution is slow in float64.
`Mamba2.torch_forward` gives head h the B and C of group h mod G, while the GPU kernels and the decoding step use group
h // (H / G).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titanplans.kernels.layers.convolution import causal_conv1d
from titanplans.kernels.precision import accumulation_dtype
from titanplans.kernels.recurrent import chunks

Forward = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Result of a mixer: the output [B, T, D], the state of the convolution, and the state of the scan."""


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Mamba 2's y [B, T, H, P] and the final state [B, H, P, N].

    Args:
        x: [B, T, H, P].
        dt: positive step sizes [B, T, H].
        a: [H], negative.
        b, c: [B, T, G, N] for G groups of consecutive heads.
        state: the initial state; None: zeros.
    """
    y, state = chunks.linear_attention(c, b, x * dt[..., None], dt * a, None if state is None else state.mT)
    return y, state.mT


def mamba_forward(
    mixer: nn.Module,
    hidden_states: torch.Tensor,
    last_state: dict[str, Any] | None = None,
    use_cache: bool = False,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> Forward:
    """Replace `Mamba.slow_forward`. The state of the scan is [B, channels, N]."""
    m: Any = mixer
    x, gate = m.in_proj(hidden_states).chunk(2, -1)
    x, conv_state = _convolve(m, x, last_state, use_cache, attention_mask)
    step, b, c = m.x_proj(x).split([m.dt_rank, m.ssm_state_size, m.ssm_state_size], -1)
    dtype = accumulation_dtype(x)
    dt = F.softplus(m.dt_proj(step)).to(dtype)[..., None]
    state = None if last_state is None else last_state["recurrent_state"].to(dtype)
    new = dt * b.to(dtype)[:, :, None] * x.to(dtype)[..., None]
    states, state = chunks.scan(new, -dt * m.A_log.to(dtype).exp(), state)
    y = (states @ c.to(dtype)[..., None])[..., 0]
    y = (y + x * m.D) * m.act(gate)
    return m.out_proj(y.to(hidden_states.dtype)), conv_state, state


def mamba2_forward(
    mixer: nn.Module,
    hidden_states: torch.Tensor,
    last_state: dict[str, Any] | None = None,
    use_cache: bool = False,
    attention_mask: torch.Tensor | None = None,
) -> Forward:
    """Replace `Mamba2.torch_forward`. The state of the scan is [B, H, P, N]."""
    m: Any = mixer
    gate, xbc, dt = m.in_proj(hidden_states).split([m.intermediate_size, m.conv_dim, m.num_heads], -1)
    xbc, conv_state = _convolve(m, xbc, last_state, use_cache, attention_mask)
    groups_width = m.n_groups * m.ssm_state_size
    dtype = accumulation_dtype(xbc)
    x, b, c = xbc.to(dtype).split([m.intermediate_size, groups_width, groups_width], -1)
    x, (b, c) = x.unflatten(-1, (-1, m.head_dim)), (y.unflatten(-1, (m.n_groups, -1)) for y in (b, c))
    dt = F.softplus(dt + m.dt_bias).clamp(*m.dt_limit).to(dtype)
    state = None if last_state is None else last_state["recurrent_state"].to(dtype)
    y, state = scan(x, dt, -m.A_log.to(dtype).exp(), b, c, state)
    y = (y + x * m._get_D(expand_to_head_dim=True)).flatten(2)
    y = m.norm(y, gate) if m.rmsnorm else y * m.act(gate)
    return m.out_proj(y.to(hidden_states.dtype)), conv_state, state


def _convolve(
    m: Any,
    x: torch.Tensor,
    last_state: dict[str, Any] | None,
    use_cache: bool,
    attention_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x [B, T, D] after the short convolution and its activation, and the state of the convolution [B, D, W]."""
    mask = None if last_state is not None or attention_mask is None else attention_mask[:, :, None]
    x, state = causal_conv1d(
        x if mask is None else x * mask,
        m.conv1d.weight[:, 0],
        m.conv1d.bias,
        initial_state=None if last_state is None else last_state["conv_state"],
        output_final_state=use_cache or last_state is not None,
    )
    # Mask again, because the bias makes padding nonzero.
    return m.act(x) if mask is None else m.act(x) * mask, state
