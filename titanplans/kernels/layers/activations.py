"""CPU replacements for activations and gated linear units, the autograd functions of `fla/modules/activations/ops.py`.

All results have the dtype of the first argument. Products and powers are computed in the accumulation dtype.
"""

import torch
import torch.nn.functional as F

from titanplans.errors import KernelError
from titanplans.kernels.precision import accumulation_dtype


def gate(g: torch.Tensor, activation: str) -> torch.Tensor:
    """Return silu(g) or sigmoid(g), as FLA names the `activation`.

    Raises:
        KernelError: another activation.
    """
    if activation in ("swish", "silu"):
        return F.silu(g)
    if activation == "sigmoid":
        return g.sigmoid()
    raise KernelError(f"gate activation {activation!r} is not computed on a CPU: use swish, silu or sigmoid")


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + exp(-x))."""
    return x.sigmoid()


def swish(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(x)."""
    return F.silu(x)


def logsigmoid(x: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return log(sigmoid(x)) / temperature."""
    return F.logsigmoid(x) / temperature


def elu_plus_one(x: torch.Tensor) -> torch.Tensor:
    """Return exp(x) for x < 0, else x + 1."""
    return F.elu(x) + 1.0


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return gelu(x) in its tanh approximation. FLA's version is compiled, which needs a C++ compiler on a CPU."""
    return F.gelu(x, approximate="tanh")


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x + bias) of x [B, D] and bias [D]."""
    return gelu(x + bias)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return relu(x)^2. A float64 input is squared in float64; FLA rounds it to float32 first."""
    return F.relu(x.to(accumulation_dtype(x))).square().to(x.dtype)


def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return silu(x) * y."""
    dtype = accumulation_dtype(x, y)
    return (F.silu(x.to(dtype)) * y.to(dtype)).to(x.dtype)


def powglu(x: torch.Tensor, y: torch.Tensor, power: float = 3.0) -> torch.Tensor:
    """Return gate(x) * y, where gate(x) is x^(power / (sqrt(x) + 1)) * sigmoid(x) for x > 0 and silu(x) otherwise."""
    dtype = accumulation_dtype(x, y)
    wide = x.to(dtype)
    # Keep the unused branch finite, because its gradient is multiplied by zero, and 0 * nan is nan.
    positive = wide.clamp_min(torch.finfo(dtype).tiny)
    base = torch.where(wide > 0, positive.pow(power / (positive.sqrt() + 1.0)), wide)
    return (base * wide.sigmoid() * y.to(dtype)).to(x.dtype)


def swiglu_linear(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return swiglu(x, y) weight^T + bias."""
    return F.linear(swiglu(x, y), weight, bias)


def powglu_linear(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, power: float = 3.0
) -> torch.Tensor:
    """Return powglu(x, y) weight^T + bias."""
    return F.linear(powglu(x, y, power), weight, bias)
