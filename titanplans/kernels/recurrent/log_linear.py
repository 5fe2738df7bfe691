"""CPU replacements for log-linear attention, in quadratic form, and for the forward of log-linear Mamba 2."""

from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.errors import KernelError
from titanplans.kernels.precision import accumulation_dtype
from titanplans.kernels.recurrent.chunks import between


class Past(NamedTuple):
    """The state: the inputs [B, T, ...] of all earlier tokens, from which each call computes all outputs again."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    level_scales: torch.Tensor


def chunk_log_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    level_scales: torch.Tensor,
    initial_state: Past | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = 1.0,
) -> tuple[torch.Tensor, Past | None]:
    """Return outputs [B, T, H, V] and the final state, or None.

    q, k are [B, T, G, K], v [B, T, H, V], log gates g [B, T, H], and level_scales [B, T, H, L].

    Raises:
        KernelError: cu_seqlens is set.
    """
    if cu_seqlens is not None:
        raise KernelError(
            "chunk_log_linear_attn: cu_seqlens is not computed on a CPU: remove it or run on a GPU"
        )
    dtype = accumulation_dtype(q, k, v, g, level_scales)
    state = Past(*(x.to(dtype) for x in (q, k, v, g, level_scales)))
    if initial_state is not None:
        state = Past(*(torch.cat(pair, 1) for pair in zip(initial_state, state, strict=True)))
    o = _attention(*state)[:, -q.shape[1] :] * (q.shape[-1] ** -0.5 if scale is None else scale)
    return o.to(v.dtype), state if output_final_state else None


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, level_scales: torch.Tensor
) -> torch.Tensor:
    """Return o_t = sum_(s <= t) level_scales[t, l] (q_t k_s) exp(g_(s+1) + .. + g_t) v_s, l the bit length of t xor s."""
    q, k, v, g, scales = (x.transpose(1, 2) for x in (q, k, v, g, level_scales))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    time = torch.arange(v.shape[2], device=v.device)
    levels = torch.frexp((time[:, None] ^ time).double()).exponent.long()
    decayed = (q @ k.mT) * between(g.cumsum(2)[..., None])[..., 0]
    return (decayed * scales.gather(3, levels.expand(*v.shape[:2], -1, -1)) @ v).transpose(1, 2)


def log_linear_mamba2_forward(
    mixer: nn.Module,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None, Any]:
    """Replace `LogLinearMamba2.forward` with its GPU branch, whose kernels have replacements."""
    from fla.layers.utils import get_layer_cache, update_layer_cache

    last_state = get_layer_cache(mixer, past_key_values)
    m: Any = mixer
    # `dt_limit` is a list if it is from a config.json, but FLA compares it with a tuple.
    m.dt_limit = tuple(m.dt_limit)
    output, conv_state, state = m.cuda_kernels_forward(hidden_states, last_state, use_cache, attention_mask)
    update_layer_cache(
        mixer,
        past_key_values,
        recurrent_state=state,
        conv_state=conv_state,
        offset=hidden_states.shape[1],
    )
    return output, None, past_key_values
