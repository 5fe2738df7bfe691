"""Mamba 2's scan by a direct formula, and its mixer's forward on a CPU.

    S_t = exp(dt_t a) S_(t-1) + dt_t b_t x_t^T,   y_t = S_t^T c_t      S [N, P], one for each head

Within a chunk y = (c b^T * decay) (dt x), with the decays from each token to each later one, all in [0, 1].

Not FLA's own forward in PyTorch, `Mamba2.torch_forward`: it gives head h the B and C of group h mod G. Its GPU kernels,
and its own decoding, give it those of group h // (H / G).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titanplans.modeling.kernels.precision import accumulation_dtype

CHUNK_SIZE = 128


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y [B, T, H, P] and the last state [B, H, P, N].

    Args:
        x: [B, T, H, P].
        dt: step sizes, positive, [B, T, H].
        a: negative, [H].
        b, c: of G groups of neighbouring heads, [B, T, G, N].
        state: the first one; None: zeros.
    """
    b, c = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (b, c))
    return recurrence(x * dt[..., None], dt * a, b, c, state)


def recurrence(
    x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the last state of S_t = exp(g_t) S_(t-1) + b_t x_t^T; g [B, T, H]; b, c [B, T, H, N]."""
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3])
    outputs = []
    for first in range(0, x.shape[1], CHUNK_SIZE):
        here = slice(first, first + CHUNK_SIZE)
        y, state = _chunk(x[:, here], g[:, here], b[:, here], c[:, here], state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def _chunk(
    x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    past = g.cumsum(1)  # [B, T, H]
    later = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).tril()[None, :, :, None]
    decay = (past[:, :, None] - past[:, None]).masked_fill(~later, -torch.inf).exp()  # [B, to, from, H]
    y = torch.einsum("bihn,bjhn,bijh,bjhp->bihp", c, b, decay, x)
    y = y + torch.einsum("bihn,bhpn,bih->bihp", c, state, past.exp())
    last = torch.einsum("bjhn,bjhp,bjh->bhpn", b, x, (past[:, -1:] - past).exp())
    return y, state * past[:, -1].exp()[..., None, None] + last


def mamba2_forward(
    mixer: nn.Module,
    hidden_states: torch.Tensor,
    last_state: dict[str, Any] | None = None,
    use_cache: bool = False,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """As `Mamba2.torch_forward`: hidden states [B, T, D] to the output, the convolution's state and the scan's."""
    m: Any = mixer
    length, masked = hidden_states.shape[1], last_state is None and attention_mask is not None
    gate, xbc, dt = m.in_proj(hidden_states).split([m.intermediate_size, m.conv_dim, m.num_heads], -1)
    if masked:
        xbc = xbc * attention_mask[:, :, None]  # type: ignore[index]
    new = xbc.transpose(1, 2)
    conv_state = None
    if last_state is not None:
        conv_state = torch.cat([last_state["conv_state"], new], -1)[..., -m.conv_kernel_size :]
        weight = m.conv1d.weight
        new = F.conv1d(conv_state, weight, m.conv1d.bias, groups=len(weight))
    else:
        if use_cache:
            conv_state = F.pad(new, (m.conv_kernel_size - length, 0))
        new = m.conv1d(new)[..., :length]
    xbc = m.act(new).transpose(1, 2)
    if masked:
        xbc = xbc * attention_mask[:, :, None]  # type: ignore[index]
    group = m.n_groups * m.ssm_state_size
    dtype = accumulation_dtype(xbc)
    x, b, c = xbc.to(dtype).split([m.intermediate_size, group, group], -1)
    x, (b, c) = x.unflatten(-1, (-1, m.head_dim)), (y.unflatten(-1, (m.n_groups, -1)) for y in (b, c))
    dt = F.softplus(dt + m.dt_bias).clamp(*m.dt_limit).to(dtype)
    state = None if last_state is None else last_state["recurrent_state"]
    y, state = scan(x, dt, -m.A_log.to(dtype).exp(), b, c, state)
    y = (y + x * m._get_D(expand_to_head_dim=True)).flatten(2)
    y = m.norm(y, gate) if m.rmsnorm else y * m.act(gate)
    return m.out_proj(y.to(hidden_states.dtype)), conv_state, state
