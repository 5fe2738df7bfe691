"""LayerNorm, RMSNorm and GroupNorm, with and without gates, and l2norm, the autograd functions in `fla/modules/norm`.

    y = (z - mean(z)) / sqrt(var(z) + eps) * weight + bias,  z = x + residual        (RMSNorm: no mean, var(z) = mean(z^2))

A gated norm multiplies y by silu(g) or sigmoid(g). With `prenorm`, z is returned, too. FLA's references `rms_norm_ref` and
`group_norm_ref` are not used: they need a weight, and round x + residual to the dtype of x before the norm.
"""

from typing import Any

import torch
import torch.nn.functional as F

from titanplans.kernels.layers.activations import gate
from titanplans.kernels.precision import accumulation_dtype

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Normed:
    """Return the norm of x [..., G * D] over each of G groups; `weight` and `bias` are [G * D]."""
    y, z = _norm(x, weight, bias, residual, eps, residual_in_fp32, is_rms_norm, num_groups)
    return (y.to(x.dtype), z) if prenorm else y.to(x.dtype)


def layer_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    *options: Any,
) -> Normed:
    """Apply a linear layer to the result of `layer_norm`, to which `options` are passed."""
    return _linear(layer_norm(x, norm_weight, norm_bias, *options), linear_weight, linear_bias)


def layer_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Normed:
    """Return the norm of x [..., D], multiplied by the activation of `g` [..., D]."""
    y, z = _norm(x, weight, bias, residual, eps, residual_in_fp32, is_rms_norm)
    y = (y * gate(g.to(y.dtype), activation)).to(x.dtype)
    return (y, z) if prenorm else y


def layer_norm_gated_linear(
    x: torch.Tensor,
    g: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    *options: Any,
) -> Normed:
    """Apply a linear layer to the result of `layer_norm_gated` with silu, to which `options` are passed."""
    y = layer_norm_gated(x, g, norm_weight, norm_bias, "swish", *options)
    return _linear(y, linear_weight, linear_bias)


def gated_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> torch.Tensor:
    """Return Mamba 2's norm of x [..., D] over groups of `group_size`, multiplied by silu(z) after or before the norm."""
    dtype = accumulation_dtype(x, weight, z)
    gate = None if z is None else F.silu(z.to(dtype))
    wide = x.to(dtype) if gate is None or norm_before_gate else x.to(dtype) * gate
    groups = 1 if group_size is None else x.shape[-1] // group_size
    y, _ = _norm(wide, weight, bias, None, eps, False, is_rms_norm, groups)
    return (y * gate if gate is not None and norm_before_gate else y).to(x.dtype)


def l2norm(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return x / sqrt(sum(x^2) + eps), summed over the last dimension."""
    wide = x.to(accumulation_dtype(x))
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(output_dtype or x.dtype)


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    residual_in_fp32: bool,
    is_rms_norm: bool,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y in the accumulation dtype, and z in the dtype of the residual.

    Without a residual, z has the dtype of x, or the accumulation dtype if `residual_in_fp32`.
    """
    dtype = accumulation_dtype(x, weight, residual)
    z = x.to(dtype) if residual is None else x.to(dtype) + residual.to(dtype)
    initial_dtype = dtype if residual_in_fp32 else x.dtype
    weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
    grouped = z.unflatten(-1, (num_groups, -1)) if num_groups > 1 else z
    # torch's norms apply the same weight to every group, so with several groups the weight is applied afterwards.
    norm_weight, norm_bias = (weight, bias) if num_groups == 1 else (None, None)
    if is_rms_norm:
        y = F.rms_norm(grouped, grouped.shape[-1:], norm_weight, eps)
        y = y if norm_bias is None else y + norm_bias
    else:
        y = F.layer_norm(grouped, grouped.shape[-1:], norm_weight, norm_bias, eps)
    if num_groups > 1:
        y = y.flatten(-2)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    return y, z.to(initial_dtype if residual is None else residual.dtype)


def _linear(normed: Normed, weight: torch.Tensor, bias: torch.Tensor | None) -> Normed:
    y, z = normed if isinstance(normed, tuple) else (normed, None)
    out = F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))
    return out if z is None else (out, z)


def layer_norm_linear_quant(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return BitNet's linear layer, applied to the norm of x; with `prenorm` also x + `residual`.

    The norm is rounded to 8 bits per token, and the weight to -1, 0 or 1 times its mean absolute value. Gradients are
    computed as if nothing were rounded (straight-through estimator).
    """
    normed = layer_norm(x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)
    y, summed = normed if isinstance(normed, tuple) else (normed, None)
    scale = 127.0 / y.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    rounded = _straight_through(y, (_round_half_away(y * scale).clamp(-128, 127) / scale))
    mean = linear_weight.abs().mean().clamp(min=1e-5)
    ternary = _straight_through(linear_weight, (linear_weight / mean).round().clamp(-1, 1) * mean)
    output = F.linear(rounded, ternary.to(rounded.dtype), linear_bias)
    return output if summed is None else (output, summed)


def _straight_through(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return `rounded`, with the gradient of x."""
    return x + (rounded - x).detach()


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    """Round halves away from zero, as the kernel does; torch rounds them to even."""
    return (x.abs() + 0.5).floor() * x.sign()
