"""LayerNorm, RMSNorm and GroupNorm, gated or not, and l2norm: forward and backward, as FLA's kernels split them.

These stand behind `fla.backends.dispatch`, below FLA's autograd functions: the names, arguments and results are
those of `fla/modules/norm/*.py`, rows are flattened to [T, D]. With z = x + residual,

    y = (z - mean(z)) / sqrt(var(z) + eps) * weight + bias          (RMSNorm: no mean, var(z) = mean(z^2))

and a gated norm multiplies y by silu(g) or sigmoid(g).
"""

import torch

from titanplans.modeling.kernels.activations import gate, gate_backward
from titanplans.modeling.kernels.precision import accumulation_dtype


def layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Returns y [T, D], mean [T] or None, 1/std [T], and z (x itself if nothing was added or cast).

    `weight` and `bias` are [G * D] for G groups; row t belongs to group t mod G.
    """
    dtype = accumulation_dtype(x, weight, residual)
    z = x.to(dtype) if residual is None else x.to(dtype) + residual.to(dtype)
    residual_dtype = residual.dtype if residual is not None else residual_dtype
    residual_out = x if residual is None and residual_dtype in (None, x.dtype) else z.to(residual_dtype)

    mean = None if is_rms_norm else z.mean(-1)
    centred = z if mean is None else z - mean.unsqueeze(-1)
    rstd = (centred.square().mean(-1) + eps).rsqrt()
    y = _affine(centred * rstd.unsqueeze(-1), weight, bias, num_groups)
    return y.to(out_dtype or x.dtype), mean, rstd, residual_out


def layer_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dres: torch.Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    num_groups: int = 1,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weight, bias and the residual; `x` is the z of the forward pass, `dres` its own gradient.

    With `recompute_output` the output y comes fifth.
    """
    xhat, dy_acc = _standardised(x, mean, rstd), dy.to(rstd.dtype)
    dz, dweight, dbias = _backward(dy_acc, xhat, weight, bias, rstd, is_rms_norm, num_groups)
    dz = dz if dres is None else dz + dres
    gradients = (dz.to(x_dtype or x.dtype), dweight, dbias, dz.to(x.dtype) if has_residual else None)
    return (
        gradients
        if not recompute_output
        else (*gradients, _affine(xhat, weight, bias, num_groups).to(dy.dtype))
    )


def layer_norm_gated_fwd(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """As `layer_norm_fwd`, times the activation of `g` [T, D]."""
    dtype = accumulation_dtype(x, g, weight, residual)
    y, mean, rstd, residual_out = layer_norm_fwd(
        x, weight, bias, eps, residual, dtype, residual_dtype, is_rms_norm=is_rms_norm
    )
    return (y * gate(g.to(dtype), activation)).to(out_dtype or x.dtype), mean, rstd, residual_out


def layer_norm_gated_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    activation: str = "swish",
    eps: float = 1e-5,
    dresidual: torch.Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, g, weight, bias and the residual; with `recompute_output` the output comes sixth."""
    dtype = rstd.dtype
    dy_acc, g_acc = dy.to(dtype), g.to(dtype)
    opened = gate(g_acc, activation)
    xhat = _standardised(x, mean, rstd)
    y = _affine(xhat, weight, bias)
    dg = gate_backward(dy_acc * y, g_acc, activation).to(x_dtype or g.dtype)
    dz, dweight, dbias = _backward(dy_acc * opened, xhat, weight, bias, rstd, is_rms_norm)
    dz = dz if dresidual is None else dz + dresidual
    gradients = (dz.to(x_dtype or x.dtype), dg, dweight, dbias, dz.to(x.dtype) if has_residual else None)
    return gradients if not recompute_output else (*gradients, (y * opened).to(dy.dtype))


def l2norm_fwd(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(sum(x^2) + eps) over the last dimension, and the factor itself, [...]."""
    x_acc = x.to(accumulation_dtype(x))
    rstd = (x_acc.square().sum(-1) + eps).rsqrt()
    return (x_acc * rstd.unsqueeze(-1)).to(output_dtype or x.dtype), rstd


def l2norm_bwd(y: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Gradient of x from the output `y` and the factor; `eps` is already in the factor."""
    y_acc, dy_acc = y.to(rstd.dtype), dy.to(rstd.dtype)
    dx = (dy_acc - y_acc * (dy_acc * y_acc).sum(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx.to(y.dtype)


def _standardised(x: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor) -> torch.Tensor:
    x = x.to(rstd.dtype)
    return (x if mean is None else x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)


def _backward(
    dy: torch.Tensor,
    xhat: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rstd: torch.Tensor,
    is_rms_norm: bool,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the input, in the accumulation dtype, and of weight and bias, in theirs."""
    dxhat = _affine(dy, weight, None, num_groups)
    dz = dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True)
    if not is_rms_norm:
        dz -= dxhat.mean(-1, keepdim=True)
    dz *= rstd.unsqueeze(-1)
    groups = (-1, num_groups, xhat.shape[-1])
    dweight = None if weight is None else (dy * xhat).view(groups).sum(0).view_as(weight).to(weight.dtype)
    dbias = None if bias is None else dy.view(groups).sum(0).view_as(bias).to(bias.dtype)
    return dz, dweight, dbias


def _affine(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, num_groups: int = 1
) -> torch.Tensor:
    """x * weight + bias with [G * D] parameters on rows that cycle through the groups."""
    if weight is None and bias is None:
        return x
    grouped = x.view(-1, num_groups, x.shape[-1])
    if weight is not None:
        grouped = grouped * weight.to(x.dtype).view(num_groups, -1)
    if bias is not None:
        grouped = grouped + bias.to(x.dtype).view(num_groups, -1)
    return grouped.view_as(x)
