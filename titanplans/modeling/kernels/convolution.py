"""The short depthwise causal convolution of FLA's mixers, with its cache and with packed sequences.

    y[t, d] = act(sum_w weight[d, w] x[t - W + 1 + w, d] + bias[d]) + residual[t, d]

Before the first token of a sequence stand the W inputs of its cache, or zeros. So each sequence is laid out behind
its W inputs of history, as one longer sequence, and then W shifted products are the whole convolution: no mask and
no loop over sequences, packed or not. Names and arguments are those of `fla/modules/causal_conv1d/ops.py`.
"""

from typing import Any, NamedTuple

import torch

from titanplans.modeling.kernels.activations import gate, gate_backward
from titanplans.modeling.kernels.precision import accumulation_dtype


def causal_conv1d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **_kernel_options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y, of the shape of x, and the cache [N, D, W] after the last token, or None.

    x is [B, T, D], or [B, T, H, D / H]; weight [D, W]; bias [D]; initial_state [N, D, W]; cu_seqlens [N + 1] with
    B = 1. `_kernel_options` are FLA's chunk indices, chunk size and layout, which change no result.
    """
    rows = x.flatten(2)
    extended = _extend(rows, weight, initial_state, cu_seqlens)
    z = _convolve(extended, weight, bias)
    y = z if activation is None else gate(z, activation)
    if residual is not None:
        y = y + residual.flatten(2).to(y.dtype)
    final_state = extended.final_state(weight.shape[1]).to(x.dtype) if output_final_state else None
    return y.to(x.dtype).view(x.shape), final_state


def causal_conv1d_bwd(
    x: torch.Tensor,
    dy: torch.Tensor,
    dht: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **_kernel_options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weight, bias, residual and initial_state; `dht` is the gradient of the final cache."""
    rows, width = x.flatten(2), weight.shape[1]
    extended = _extend(rows, weight, initial_state, cu_seqlens)
    dz = dy.reshape(rows.shape).to(extended.values.dtype)
    if activation is not None:
        dz = gate_backward(dz, _convolve(extended, weight, bias), activation)
    dbias = None if bias is None else dz.sum((0, 1)).to(bias.dtype)

    dz = extended.spread(dz, width)
    dvalues = torch.zeros_like(extended.values)
    dweight = torch.empty_like(weight, dtype=dz.dtype)
    for w in range(width):
        inputs = slice(w + 1, w + 1 + dz.shape[1])
        dvalues[:, inputs].addcmul_(dz, weight[:, w].to(dz.dtype))
        dweight[:, w] = (dz * extended.values[:, inputs]).sum((0, 1))
    if dht is not None:
        extended.add_to_final_state(dvalues, dht.to(dz.dtype))
    dx, dstate = extended.split(dvalues, width)
    return (
        dx.to(x.dtype).view(x.shape),
        dweight.to(weight.dtype),
        dbias,
        None if residual is None else dy,
        None if initial_state is None else dstate.to(initial_state.dtype),
    )


def causal_conv1d_update_states(
    x: torch.Tensor,
    state_len: int,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The cache [N, D, W] after x: the last W inputs of each sequence, its initial cache included."""
    x = x.unsqueeze(0) if x.dim() == 2 else x
    weight = x.new_empty(x.shape[-1], state_len)
    return _extend(x, weight, initial_state, cu_seqlens).final_state(state_len).to(x.dtype)


def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of N sequences, x of N * D elements; shifts `cache` [N, D, W] in place and returns it."""
    dtype = accumulation_dtype(x, weight)
    cache.copy_(torch.cat((cache[..., 1:], x.reshape(cache.shape[0], -1, 1).to(cache.dtype)), -1))
    y = cache.to(dtype).sum(-1) if weight is None else (cache.to(dtype) * weight.to(dtype)).sum(-1)
    y = y if bias is None else y + bias.to(dtype)
    y = y if activation is None else gate(y, activation)
    y = y if residual is None else y + residual.reshape(y.shape).to(dtype)
    return y.to(x.dtype).view(x.shape), cache


class _Extended(NamedTuple):
    """Sequences behind their history: `values` [B, W + T, D], or [1, N * W + T, D] for N packed sequences.

    `tokens` [T], `history` [N, W] and `last` [N, W] are places in a packed layout; None in a batch, where
    history comes first and the final cache last.
    """

    values: torch.Tensor
    tokens: torch.Tensor | None = None
    history: torch.Tensor | None = None
    last: torch.Tensor | None = None

    def spread(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """[B, T, D] of tokens -> one entry for every place from W on, zero where history stands."""
        if self.tokens is None:
            return rows
        shape = (1, self.values.shape[1] - width, rows.shape[-1])
        return rows.new_zeros(shape).index_copy(1, self.tokens - width, rows)

    def gather(self, places: torch.Tensor, width: int) -> torch.Tensor:
        """Undoes `spread`."""
        return places if self.tokens is None else places.index_select(1, self.tokens - width)

    def split(self, values: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token part [B, T, D] and history part [N, D, W] of something laid out like `values`."""
        if self.tokens is None:
            return values[:, width:], values[:, :width].transpose(1, 2)
        return values.index_select(1, self.tokens), values[0, self.history].transpose(1, 2)

    def final_state(self, width: int) -> torch.Tensor:
        """[N, D, W]."""
        last = self.values[:, -width:] if self.last is None else self.values[0, self.last]
        return last.transpose(1, 2).contiguous()

    def add_to_final_state(self, dvalues: torch.Tensor, dstate: torch.Tensor) -> None:
        """Adds [N, D, W] onto the places that `final_state` reads."""
        if self.last is None:
            dvalues[:, -dstate.shape[-1] :] += dstate.transpose(1, 2)
        else:
            dvalues[0, self.last] += dstate.transpose(1, 2)


def _extend(
    x: torch.Tensor, weight: torch.Tensor, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> _Extended:
    """x [B, T, D] in the accumulation dtype, each sequence behind W inputs of history."""
    dtype, width = accumulation_dtype(x, weight, initial_state), weight.shape[1]
    x = x.to(dtype)
    num_sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        history = x.new_zeros(num_sequences, width, x.shape[-1])
    else:
        history = initial_state.to(dtype).transpose(1, 2)
    if cu_seqlens is None:
        return _Extended(torch.cat((history, x), 1))

    steps = torch.arange(x.shape[1], device=x.device)
    shift = width * torch.arange(num_sequences, device=x.device)
    window = torch.arange(width, device=x.device)
    tokens = steps + width * (torch.searchsorted(cu_seqlens[1:].contiguous(), steps, right=True) + 1)
    before = (cu_seqlens[:-1] + shift)[:, None] + window
    last = (cu_seqlens[1:] + shift)[:, None] + window
    values = x.new_empty(1, x.shape[1] + num_sequences * width, x.shape[-1])
    values[0, before] = history
    values[0, tokens] = x[0]
    return _Extended(values, tokens, before, last)


def _convolve(extended: _Extended, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The convolution at every token, [B, T, D], before the activation."""
    width, values = weight.shape[1], extended.values
    weight = weight.to(values.dtype)
    length = values.shape[1] - width
    z = values[:, 1 : 1 + length] * weight[:, 0]
    for w in range(1, width):
        z.addcmul_(values[:, w + 1 : w + 1 + length], weight[:, w])
    if bias is not None:
        z += bias.to(values.dtype)
    return extended.gather(z, width)
