"""CPU replacement for the short depthwise causal convolution of FLA's mixers (`fla/modules/causal_conv1d/ops.py`).

    y[t, d] = act(sum_w weight[d, w] x[t - W + 1 + w, d] + bias[d]) + residual[t, d]

FLA has no reference for it. Each sequence is prefixed with the W inputs of its cache, or zeros. Then the convolution is a
sum of W shifted products, without a mask or a loop over sequences, packed or not.
"""

import torch

from titanplans.kernels.layers.activations import gate
from titanplans.kernels.precision import accumulation_dtype


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return y, of the shape of x, and the cache [N, D, W] after the last token, or None.

    x is [B, T, D] or [B, T, H, D / H], weight [D, W], bias [D], initial_state [N, D, W], and cu_seqlens [N + 1] with B = 1.
    The last three arguments, which determine how FLA's kernel divides its work, have no effect.
    """
    width = weight.shape[1]
    dtype = accumulation_dtype(x, weight, initial_state)
    values, tokens, last = _with_history(x.flatten(2).to(dtype), width, initial_state, cu_seqlens)
    length = values.shape[1] - width
    weight = weight.to(dtype)
    y = values[:, 1 : 1 + length] * weight[:, 0]
    for w in range(1, width):
        y = torch.addcmul(y, values[:, w + 1 : w + 1 + length], weight[:, w])
    y = y if tokens is None else y.index_select(1, tokens - width)
    y = y if bias is None else y + bias.to(dtype)
    y = y if activation is None else gate(y, activation)
    y = y if residual is None else y + residual.flatten(2).to(dtype)
    final_state = _cache(values, width, last).to(x.dtype) if output_final_state else None
    return y.to(x.dtype).view(x.shape), final_state


def causal_conv1d_update_states(
    x: torch.Tensor,
    state_len: int,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cache [N, D, W] after x [B, T, D] or [T, D]: the last W inputs, which may be some of `initial_state`."""
    x = x.unsqueeze(0) if x.dim() == 2 else x
    values, _, last = _with_history(x, state_len, initial_state, cu_seqlens)
    return _cache(values, state_len, last)


def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output for one token of each of N sequences, x of N * D elements. Shifts `cache` [N, D, W] in place."""
    dtype = accumulation_dtype(x, weight)
    cache.copy_(torch.cat((cache[..., 1:], x.reshape(cache.shape[0], -1, 1).to(cache.dtype)), -1))
    y = cache.to(dtype).sum(-1) if weight is None else (cache.to(dtype) * weight.to(dtype)).sum(-1)
    y = y if bias is None else y + bias.to(dtype)
    y = y if activation is None else gate(y, activation)
    y = y if residual is None else y + residual.reshape(y.shape).to(dtype)
    return y.to(x.dtype).view(x.shape), cache


def _with_history(
    x: torch.Tensor, width: int, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return sequences, each prefixed with its history: [B, W + T, D], or [1, N * W + T, D] for N packed sequences.

    For packed sequences also return the indices of the tokens [T] and of the last W inputs of each sequence [N, W] in the
    result; otherwise None.
    """
    num_sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        history = x.new_zeros(num_sequences, width, x.shape[-1])
    else:
        history = initial_state.to(x.dtype).transpose(1, 2)
    if cu_seqlens is None:
        return torch.cat((history, x), 1), None, None
    steps = torch.arange(x.shape[1], device=x.device)
    shift = width * torch.arange(num_sequences, device=x.device)
    window = torch.arange(width, device=x.device)
    tokens = steps + width * (torch.searchsorted(cu_seqlens[1:].contiguous(), steps, right=True) + 1)
    before, last = ((bound + shift)[:, None] + window for bound in (cu_seqlens[:-1], cu_seqlens[1:]))
    values = x.new_empty(1, x.shape[1] + num_sequences * width, x.shape[-1])
    values[0, before], values[0, tokens] = history, x[0]
    return values, tokens, last


def _cache(values: torch.Tensor, width: int, last: torch.Tensor | None) -> torch.Tensor:
    """Return the cache [N, D, W] of the result of `_with_history`."""
    inputs = values[:, -width:] if last is None else values[0, last]
    return inputs.transpose(1, 2).contiguous()
