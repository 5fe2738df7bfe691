"""Activations and gated linear units: the functions behind FLA's autograd functions in `fla/modules/activations`.

All are elementwise. FLA's `output_contiguous` asks its kernels for dense storage; here every result is dense
already, so the argument has nothing left to do.
"""

import torch
import torch.nn.functional as F

from titanplans.errors import KernelError
from titanplans.modeling.kernels.precision import accumulation_dtype


def gate(g: torch.Tensor, activation: str) -> torch.Tensor:
    """silu(g) or sigmoid(g), by FLA's names.

    Raises:
        KernelError: any other activation.
    """
    if activation in ("swish", "silu"):
        return F.silu(g)
    if activation == "sigmoid":
        return g.sigmoid()
    raise KernelError(f"gate activation {activation!r} is not computed on a CPU; use swish, silu or sigmoid")


def gate_backward(dy: torch.Tensor, g: torch.Tensor, activation: str) -> torch.Tensor:
    """dy times the derivative of `gate` at g."""
    if activation == "sigmoid":
        return torch.ops.aten.sigmoid_backward(dy, g.sigmoid())
    return torch.ops.aten.silu_backward(dy, g)


def sigmoid_fwd(x: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return x.sigmoid().contiguous()


def sigmoid_bwd(x: torch.Tensor, dy: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    """Its gradient."""
    return torch.ops.aten.sigmoid_backward(dy, x.sigmoid()).contiguous()


def swish_fwd(x: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    """x * sigmoid(x)."""
    return F.silu(x).contiguous()


def swish_bwd(x: torch.Tensor, dy: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    """Its gradient."""
    return torch.ops.aten.silu_backward(dy, x).contiguous()


def logsigmoid_fwd(
    x: torch.Tensor, temperature: float = 1.0, output_contiguous: bool = False
) -> torch.Tensor:
    """log(sigmoid(x)) / temperature."""
    return (F.logsigmoid(x) / temperature).contiguous()


def logsigmoid_bwd(
    x: torch.Tensor, dy: torch.Tensor, temperature: float = 1.0, output_contiguous: bool = False
) -> torch.Tensor:
    """Its gradient, dy * sigmoid(-x) / temperature."""
    return (dy * (-x).sigmoid() / temperature).contiguous()


def swiglu_fwd(x: torch.Tensor, y: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    """silu(x) * y."""
    dtype = accumulation_dtype(x, y)
    return (F.silu(x.to(dtype)) * y.to(dtype)).to(x.dtype).contiguous()


def swiglu_fwdbwd(
    x: torch.Tensor,
    y: torch.Tensor,
    g: torch.Tensor,
    use_weight: bool = False,
    output_contiguous: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Gradients of x and y for the output gradient `g`; with `use_weight` the output too, which FLA recomputes."""
    dtype = accumulation_dtype(x, y, g)
    x_acc, y_acc, g_acc = x.to(dtype), y.to(dtype), g.to(dtype)
    opened = F.silu(x_acc)
    dx = torch.ops.aten.silu_backward(g_acc * y_acc, x_acc).to(x.dtype).contiguous()
    dy = (g_acc * opened).to(y.dtype).contiguous()
    return (dx, dy, (opened * y_acc).to(x.dtype).contiguous()) if use_weight else (dx, dy)


def powglu_fwd(
    x: torch.Tensor, y: torch.Tensor, power: float = 3.0, output_contiguous: bool = False
) -> torch.Tensor:
    """gate(x) * y, where gate(x) is x^(power / (sqrt(x) + 1)) * sigmoid(x) for x > 0 and silu(x) otherwise."""
    dtype = accumulation_dtype(x, y)
    return (_power_gate(x.to(dtype), power) * y.to(dtype)).to(x.dtype)


def powglu_fwdbwd(
    x: torch.Tensor,
    y: torch.Tensor,
    g: torch.Tensor,
    power: float = 3.0,
    use_weight: bool = False,
    output_contiguous: bool = False,
) -> tuple[torch.Tensor, ...]:
    """As `swiglu_fwdbwd`."""
    dtype = accumulation_dtype(x, y, g)
    x_acc, y_acc, g_acc = x.detach().to(dtype).requires_grad_(), y.to(dtype), g.to(dtype)
    with torch.enable_grad():
        opened = _power_gate(x_acc, power)
        (dx,) = torch.autograd.grad(opened, x_acc, g_acc * y_acc)
    opened = opened.detach()
    gradients = (dx.to(x.dtype), (g_acc * opened).to(y.dtype))
    return (*gradients, (opened * y_acc).to(x.dtype)) if use_weight else gradients


def gelu_fwd(x: torch.Tensor) -> torch.Tensor:
    """The tanh approximation; FLA compiles its own, which needs a C++ compiler on a CPU."""
    return F.gelu(x, approximate="tanh")


def gelu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Its gradient."""
    return torch.ops.aten.gelu_backward(g, x, approximate="tanh")


def bias_gelu(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(y + bias), y [B, D] and bias [D]."""
    return gelu_fwd(y + bias)


def bias_gelu_bwd(g: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of y and bias."""
    dy = gelu_bwd(g, y + bias)
    return dy, dy.sum(0, dtype=bias.dtype)


def sqrelu_fwd(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2, squared in float64 for a float64 input, which FLA's would round to float32."""
    return F.relu(x.to(accumulation_dtype(x))).square().to(x.dtype)


def sqrelu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Its gradient."""
    dtype = accumulation_dtype(x)
    return (2.0 * g.to(dtype) * F.relu(x.to(dtype))).to(x.dtype)


def _power_gate(x: torch.Tensor, power: float) -> torch.Tensor:
    # The unused branch must stay finite: its gradient is multiplied by zero, and 0 * nan is nan.
    positive = x.clamp_min(torch.finfo(x.dtype).tiny)
    exponent = power / (positive.sqrt() + 1.0)
    return torch.where(x > 0, positive.pow(exponent), x) * x.sigmoid()
