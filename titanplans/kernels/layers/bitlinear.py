"""For a CPU: the fused norm and quantized product of BitNet's projections."""

import torch
import torch.nn.functional as F

from titanplans.kernels.layers.norms import layer_norm


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
    """Return the norm of x, rounded to 8 bits a token, times the weight, rounded to -1, 0 and 1 times its mean.

    The gradient passes through what rounds. With `prenorm` also x + `residual`.
    """
    normed = layer_norm(x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)
    y, summed = normed if isinstance(normed, tuple) else (normed, None)
    scale = 127.0 / y.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    rounded = _through(y, (_away_from_zero(y * scale).clamp(-128, 127) / scale))
    mean = linear_weight.abs().mean().clamp(min=1e-5)
    ternary = _through(linear_weight, (linear_weight / mean).round().clamp(-1, 1) * mean)
    output = F.linear(rounded, ternary.to(rounded.dtype), linear_bias)
    return output if summed is None else (output, summed)


def _through(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """`rounded`, with the gradient of x."""
    return x + (rounded - x).detach()


def _away_from_zero(x: torch.Tensor) -> torch.Tensor:
    """Round halves away from zero, as the kernel does."""
    return (x.abs() + 0.5).floor() * x.sign()
