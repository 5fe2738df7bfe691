"""How far a right plan may be from the whole model: the unit of a difference, and how many of them.

A split model computes the same sums in another order. A tolerance is a product of two factors; neither is guessed.

The *unit* of a quantity t, its "epsilon", is measured on the whole model: the largest change of t when every weight moves
by one rounding, w (1 + eps xi) with xi = -1 or 1 at random, over a few draws of the whole training; and at least the
rounding of t itself. So it contains the model's condition, which does not depend on the plan. A gradient that is zero up
to rounding (a key bias's, which softmax cancels) gets the unit of its rounding.

The number of units allowed is counted, in float64 for the worst case, in fewer bits in probability:

- float64: by the backward error of a sum (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section
  4.2), n terms added in any order are the exact sum of terms moved by at most (n - 1) eps each. The *depth* is the
  number of roundings in which an order may differ along the longest path from the weights to a gradient, counted from
  shapes, once for each step. Differences are max|a - b|. It is generous, since roundings cancel: a right plan shows
  about 1. There it costs nothing: a wrong placement is off by 10^13.
- float32: the depth would allow as much as a wrong plan errs. Roundings are taken as independent (Higham and Mary 2019,
  SIAM J. Sci. Comput. 41(5), A2815), differences as root mean squares over a tensor. The difference of two runs of the
  whole model, which measures a unit, has the variance 2 s^2. The split model rounds the output of a region once on each
  of R ranks and as often in their sum, the whole one once: their difference has at most (1 + 2 R) s^2 + s^2. The ratio
  of the deviations is at most sqrt(1 + R). For a scalar, or a tensor of few elements, one draw may be several deviations
  from the largest of three: `CHANCE` of them.
- bfloat16: a check. A tensor's roundings there are as large as many mistakes, so only the losses and the norms are
  compared, which average over them: `CHECKED` units, the unit the largest relative change of any loss, or norm, so far in
  the training; of a norm at least one rounding of its gradients. Everything else has to be finite. That the sums are
  right is float64's to prove.

The weights after the training are an exception in float64: AdamW divides a gradient that is mere rounding by its own
size, and moves the weight in an arbitrary direction. `weight_unit` bounds how far, by the gradient's own unit.
"""

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.split.decoder import find_decoder

DRAWS = 3
"""Perturbed runs of the whole model; the unit is the largest change in any of them."""

FIRST_DRAWS = 1
"""Draws until a case looks wrong. A unit of fewer draws is no larger: a case that is right by it is right by `DRAWS`."""

MORE_DRAWS = 32
"""Draws in fewer bits than float64 before a case is called wrong. A right plan is one more draw, and changes a quantity more
than all of them once in 33 times, whatever the distribution: also if most draws change nothing and a few move a number over
an edge, such as a router's, or that of weights and activations of few bits."""

DECIDABLE = 0.8
"""The largest tolerance, relative to the quantity and times the ranks. The least error of a plan is that the contribution of
one of R ranks is missing, 1 / R of a gradient to which they contribute alike. For fewer than 8 ranks it is that for 8."""

CHECKED = 16.0
"""Units that a loss or a norm may be off in bfloat16. Of 1,863 of right plans, all architectures at degree 2, losses are off
by at most 2.5 units of three draws, and norms by 1.5; in wider models GLA's by 13. With v_proj doubled, Qwen3's losses are
off by up to 48, its norms by 14 to 32."""

CHANCE = 4.0
"""|z| of one normal number exceeds 4 times the largest of three others once in 300 draws of a scalar, and practically never
for a tensor, whose mean square varies less."""


class Tolerance:
    """How two tensors are compared in one dtype, and which differences are rounding.

    Args:
        model: whole.
        logits: its largest; their shape and their dtype are used, no values.
        steps: of the optimizer.

    Attributes:
        exact: a bound of the worst case, in float64; else in probability.
        checks: in 16 bits: losses and norms alone are compared.
        eps: of the dtype.
    """

    def __init__(self, model: nn.Module, logits: torch.Tensor, steps: int):
        self.eps = torch.finfo(logits.dtype).eps
        self.exact = logits.dtype == torch.float64
        self.checks = logits.dtype.itemsize < 4
        self._depth = depth(model, logits) * steps

    def allowed(self, ranks: int) -> float:
        """Return how many units a right plan may be off over so many ranks."""
        if self.checks:
            return CHECKED
        return self._depth if self.exact else CHANCE * (1 + ranks) ** 0.5

    def hides(self, unit: float, size: float, ranks: int) -> bool:
        """Whether a quantity of `size` has a tolerance over so many ranks by which a wrong plan would be right."""
        return self.allowed(ranks) * unit > DECIDABLE / max(ranks, 8) * size

    def compares(self, what: str) -> bool:
        """Whether quantities of this kind are compared; else they have to be finite, and of the right shape."""
        return not self.checks or what in ("loss", "norm")

    def difference(self, value: torch.Tensor, expected: torch.Tensor) -> float:
        """Return how far `value` is from `expected`; infinity if shapes differ or a number is NaN."""
        if value.shape != expected.shape:
            return float("inf")
        if not value.numel():
            return 0.0
        if self.exact:
            return difference(value, expected)
        apart = self.size(value.double() - expected.double())
        return apart if apart == apart else float("inf")

    def size(self, tensor: torch.Tensor) -> float:
        """Return how large `tensor` is: its largest magnitude, or its root mean square."""
        if not tensor.numel():
            return 0.0
        return largest(tensor) if self.exact else tensor.double().square().mean().sqrt().item()

    def rounding(self, tensor: torch.Tensor) -> float:
        """Return the rounding of `tensor` itself."""
        return torch.finfo(tensor.dtype).eps * self.size(tensor)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype in which a tolerance would accept a wrong gradient."""
    if dtype not in (torch.float64, torch.float32):
        raise PlanError(
            f"dtype = {dtype}: its rounding is as large as many mistakes, so it proves nothing by itself: use torch.float64 "
            "(or torch.float32); a few of its cases are in bfloat16"
        )


def depth(model: nn.Module, logits: torch.Tensor) -> float:
    """Return how many roundings the order of sums can change from weights to gradients, in epsilons.

    Each matrix is contracted over its inputs in the forward and over its outputs in the backward;
    a weight's gradient is a sum over all tokens; attention, or a scan, sums over the sequence in
    every block; the softmax over the vocabulary. Of stacked experts that counts more than one contraction, which is safe.

    `logits`: the vocabulary last, batch and sequence before in any order.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    contracted = sum(len(p) + p.numel() // max(len(p), 1) for p in matrices)
    *tokens, vocabulary = logits.shape
    count = torch.Size(tokens).numel()
    blocks = max(len(find_decoder(model, required=False).blocks), 1)
    return float(contracted + count + max(tokens, default=1) * blocks + vocabulary)


def perturb(model: nn.Module, seed: int) -> None:
    """Move each parameter of `model` by one rounding up or down; in fewer bits than float64 one in 8 elements.

    There any small change makes all roundings within the model fall differently. A split model does just that, with the
    same weights: the fewer of them move, the less else is measured.
    """
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if not param.is_floating_point():  # codes are not rounded
            continue
        sign = torch.randint(2, param.shape, generator=generator).to(param) * 2 - 1
        if param.dtype != torch.float64:
            sign *= torch.randint(8, param.shape, generator=generator).to(param) == 0
        with torch.no_grad():
            param.mul_(1 + torch.finfo(param.dtype).eps * sign)


def difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max|value - expected|; infinity if shapes differ or a number is NaN."""
    if value.shape != expected.shape:
        return float("inf")
    if not value.numel():
        return 0.0
    worst = (value - expected).abs().max().item()
    return worst if worst == worst else float("inf")


def largest(tensor: torch.Tensor) -> float:
    """Return max|tensor|, 0 for an empty one."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def weight_unit(weight: torch.Tensor, unit: float, steps: int, optimizer: torch.optim.AdamW) -> float:
    """Return the unit of a float64 weight after some steps of AdamW.

    A step is lr m / (sqrt(v) + e), m and v the corrected means of the gradients and of their squares. Let each gradient
    be off by d. Then m, a mean, is off by at most d, and so is sqrt(v), a norm of the gradients whose weights sum to 1.
    With |m| at most about sqrt(v), the step changes by at most 2 lr d / e, since e is far above d in float64.

    Args:
        weight: after the steps.
        unit: the largest of its gradients.
        steps: of the optimizer.
        optimizer: for lr and e.
    """
    lr, e = optimizer.defaults["lr"], optimizer.defaults["eps"]
    return torch.finfo(weight.dtype).eps * largest(weight) + 2 * steps * lr * unit / e
