"""The tolerance of a correct plan: a rounding unit, times the number of units by which a correct plan may differ.

A split model computes the same sums as the unsplit model, but in another order, so its rounding differs.

The *unit* of a quantity t, its "epsilon", is measured on the unsplit model. It is the largest change of t when every weight
is perturbed by one rounding, w (1 + eps xi) with xi = -1 or 1 at random, over a few draws of the whole training. The unit
is at least the rounding of t itself. So the unit contains the condition number of the model, which does not depend on the
plan. If a gradient is zero up to rounding (as for a key's bias, which softmax cancels), its unit is its rounding.

The number of units allowed is a bound of the worst case in float64, and a probable bound in fewer bits:

- float64: by the backward error of a sum (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section
  4.2), n terms added in any order are the exact sum of terms perturbed by at most (n - 1) eps each. The *depth* is the
  number of roundings in which an order may differ along the longest path from the weights to a gradient, counted from
  shapes, once for each step. Differences are max|a - b|. The bound is generous, since roundings cancel: a correct plan
  differs by about 1 unit. This does no harm, since a wrong placement differs by 10^13.
- float32: the depth would allow differences as large as those of a wrong plan. So roundings are assumed independent
  (Higham and Mary 2019, SIAM J. Sci. Comput. 41(5), A2815), and differences are root mean squares over a tensor. Let
  s^2 be the variance of one rounding of a region's output. A unit is measured by the difference of two runs of the unsplit
  model, which has the variance 2 s^2. The split model rounds the output on each of R ranks, and up to R times in the sum,
  and the unsplit model rounds it once. So their difference has at most the variance (1 + 2 R) s^2 + s^2, and the ratio of
  the standard deviations is at most sqrt(1 + R). `CHANCE` multiplies it, since for a scalar, or a tensor of few elements,
  a correct plan may differ by several times the largest of three draws.
- bfloat16: a check, not a proof. The rounding of a tensor is as large as many mistakes, so only losses and norms are
  compared, over which rounding averages out. `CHECKED` units are allowed. The unit of a loss is the largest relative
  change of any loss so far in the training. The unit of a norm is the largest relative change of any norm so far, and at
  least one rounding of its gradients. Everything else has to be finite. The cases in float64 prove that the sums are
  right.

The weights after the training are an exception in float64: AdamW divides a gradient that is only rounding by its own
size, and moves the weight in an arbitrary direction. `weight_unit` bounds this move by the gradient's unit.
"""

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.split.decoder import find_decoder

DRAWS = 3
"""Perturbed runs of the unsplit model; the unit is the largest change in any of them."""

FIRST_DRAWS = 1
"""The number of draws with which cases begin. More draws can only enlarge the unit, so a case that passes would also pass
with `DRAWS`."""

MORE_DRAWS = 32
"""Draws in fewer bits than float64 before a case is reported as wrong. A correct plan acts like one more draw, which changes
a quantity more than all 32 others once in 33 times, whatever the distribution. Some distributions are extreme: most draws
change nothing, and a few move a number across a threshold, for example in a router or in a cast to few bits."""

DECIDABLE = 0.8
"""The largest tolerance, relative to the quantity and multiplied by the number of ranks (at least 8). The smallest error of
a wrong plan is a missing contribution of one of R ranks: 1 / R of a gradient to which all contribute equally."""

CHECKED = 16.0
"""Number of units by which a loss or a norm may differ in bfloat16. Over 1,863 losses and norms of correct plans, of all
architectures at degree 2, losses differ by at most 2.5 units of three draws, and norms by 1.5; in wider models the norms
of GLA differ by up to 13 units. With v_proj doubled, Qwen3's losses differ by up to 48 units, and its norms by 14 to
32."""

CHANCE = 4.0
"""The magnitude of a normal number exceeds 4 times the largest of three others once in 300 draws. This can happen to a
scalar. It practically never happens to a tensor, since a mean square over many elements varies less."""


class Tolerance:
    """Compares tensors in one dtype, and tells which differences are rounding.

    Args:
        model: unsplit.
        logits: its largest logits [..., vocabulary]; only their shape and dtype are used.
        steps: number of optimizer steps.

    Attributes:
        exact: the tolerance bounds the worst case (float64), and differences are maxima. Otherwise the tolerance is a
            probable bound, and differences are root mean squares.
        checks: only losses and norms are compared (16 bits).
        eps: machine epsilon of the dtype.
    """

    def __init__(self, model: nn.Module, logits: torch.Tensor, steps: int):
        self.eps = torch.finfo(logits.dtype).eps
        self.exact = logits.dtype == torch.float64
        self.checks = logits.dtype.itemsize < 4
        self._depth = depth(model, logits) * steps

    def allowed(self, ranks: int) -> float:
        """Return the number of units by which a correct plan may differ over this number of ranks."""
        if self.checks:
            return CHECKED
        return self._depth if self.exact else CHANCE * (1 + ranks) ** 0.5

    def hides(self, unit: float, size: float, ranks: int) -> bool:
        """Whether the tolerance of a quantity of `size` is so large that a wrong plan over this number of ranks may pass."""
        return self.allowed(ranks) * unit > DECIDABLE / max(ranks, 8) * size

    def compares(self, what: str) -> bool:
        """Whether quantities of this kind are compared. Others only have to be finite and of the right shape."""
        return not self.checks or what in ("loss", "norm")

    def difference(self, value: torch.Tensor, expected: torch.Tensor) -> float:
        """Return the difference of two tensors, maximum or root mean square; infinity if shapes differ or it is NaN."""
        if value.shape != expected.shape:
            return float("inf")
        if not value.numel():
            return 0.0
        if self.exact:
            return difference(value, expected)
        rms = self.size(value.double() - expected.double())
        return rms if rms == rms else float("inf")  # NaN is unequal to itself

    def size(self, tensor: torch.Tensor) -> float:
        """Return the largest magnitude in `tensor` if `exact`, else its root mean square."""
        if not tensor.numel():
            return 0.0
        return largest(tensor) if self.exact else tensor.double().square().mean().sqrt().item()

    def rounding(self, tensor: torch.Tensor) -> float:
        """Return one rounding of `tensor`: eps times its size."""
        return torch.finfo(tensor.dtype).eps * self.size(tensor)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise PlanError for a dtype in which a tolerance would accept a wrong gradient."""
    if dtype not in (torch.float64, torch.float32):
        raise PlanError(
            f"dtype = {dtype}: its rounding is as large as many mistakes, so it proves nothing by itself: use torch.float64 "
            "(or torch.float32), in which a few cases are checked in bfloat16, too"
        )


def depth(model: nn.Module, logits: torch.Tensor) -> float:
    """Return the number of roundings from weights to gradients that depend on the order of sums.

    Each matrix is contracted over its inputs in the forward and over its outputs in the backward. A weight's gradient is
    summed over all tokens. Attention, or a scan, sums over the sequence in every block, and the softmax over the vocabulary.

    Args:
        model: unsplit.
        logits: the vocabulary is the last dimension; batch and sequence come before it in any order.
    """
    # For stacked experts this counts more than one contraction, which only makes the bound larger.
    matrices = [p for p in model.parameters() if p.ndim > 1]
    contracted = sum(len(p) + p.numel() // max(len(p), 1) for p in matrices)
    *tokens, vocabulary = logits.shape
    count = torch.Size(tokens).numel()
    blocks = max(len(find_decoder(model, required=False).blocks), 1)
    return float(contracted + count + max(tokens, default=1) * blocks + vocabulary)


def perturb(model: nn.Module, seed: int) -> None:
    """Change every weight of `model` by one rounding, up or down at random; in fewer bits than float64 one weight in 8."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if not param.is_floating_point():  # codes of a quantized weight
            continue
        sign = torch.randint(2, param.shape, generator=generator).to(param) * 2 - 1
        # In fewer bits any small change makes all activations round differently, as they do in a split model. A split
        # model has the same weights as the unsplit model, so the effect of changed weights should not be measured, and
        # only few weights change.
        if param.dtype != torch.float64:
            sign *= torch.randint(8, param.shape, generator=generator).to(param) == 0
        with torch.no_grad():
            param.mul_(1 + torch.finfo(param.dtype).eps * sign)


def difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max|value - expected|; infinity if shapes differ or it is NaN."""
    if value.shape != expected.shape:
        return float("inf")
    if not value.numel():
        return 0.0
    worst = (value - expected).abs().max().item()
    return worst if worst == worst else float("inf")  # NaN is unequal to itself


def largest(tensor: torch.Tensor) -> float:
    """Return max|tensor|; 0 for an empty tensor."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def weight_unit(weight: torch.Tensor, unit: float, steps: int, optimizer: torch.optim.AdamW) -> float:
    """Return the unit of a float64 weight after steps of AdamW.

    A step is lr m / (sqrt(v) + e), with m and v the bias-corrected means of the gradients and of their squares. If each
    gradient differs by d, then m, a mean, differs by at most d, and so does sqrt(v), a weighted norm of the gradients whose
    weights sum to 1. With |m| at most about sqrt(v), the step differs by at most 2 lr d / e, since e is far above d in
    float64.

    Args:
        weight: the weight after the steps.
        unit: the largest unit of its gradients in any step.
        steps: number of optimizer steps.
        optimizer: the optimizer, whose lr and e are used.
    """
    lr, e = optimizer.defaults["lr"], optimizer.defaults["eps"]
    return torch.finfo(weight.dtype).eps * largest(weight) + 2 * steps * lr * unit / e
