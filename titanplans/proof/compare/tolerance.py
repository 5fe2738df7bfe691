"""How far a right plan may be from the whole model: the unit of a difference, and how many of them.

A split model computes the same sums in another order. A tolerance is a product of two things, neither of them guessed.

The *unit* of a quantity t, its "epsilon", is measured on the whole model: the most that t changes when every weight is
moved by one rounding, w (1 + eps xi) with xi = -1 or 1 at random, in a few such draws of the whole training; and not
less than the rounding of t itself. So it contains the model's condition, which is no matter of the plan. A gradient that
is zero but for rounding (a key bias's, which softmax cancels) so gets the unit that its rounding has.

How many units are allowed is counted, in float64 in the worst case, in fewer bits in probability:

- float64: by the backward error of a sum (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section
  4.2), n terms added in any order are the exact sum of terms moved by at most (n - 1) eps each. The *depth* is the
  number of roundings in which an order may differ along the longest path from the weights to a gradient, counted from
  shapes, once for each step. Differences are max|a - b|. It is generous, since roundings cancel: a right plan shows
  about 1. There it costs nothing: a wrong placement is off by 10^13.
- float32 and bfloat16: there the depth would allow as much as a wrong plan does. Roundings are taken as independent
  (Higham and Mary 2019, SIAM J. Sci. Comput. 41(5), A2815), differences as root mean squares over a tensor. Two runs of
  the whole model that are compared for a unit have the variance 2 s^2. Of split and whole, the split one rounds
  what leaves a region once on each of R ranks, and as often in their sum, where the whole one rounds once: at most
  (1 + 2 R) s^2 beside s^2. The ratio of the deviations is at most sqrt(1 + R), and of a tensor of few elements, or a
  scalar, one draw may be several deviations from the largest of three: `CHANCE` of them.

The weights after the training are different in float64: where a gradient is rounding only, AdamW divides it by its own
size, and so moves the weight in an arbitrary direction. How far at most is a formula of the gradient's own unit: see
`weight_unit`.
"""

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.decoder import find_decoder

DRAWS = 3
"""Perturbed runs of the whole model; the unit is the largest change in any of them."""

FIRST_DRAWS = 1
"""As many, until a case looks wrong. A unit of fewer draws is no larger, so what is right by it is right by theirs."""

MORE_DRAWS = 32
"""As many, in fewer bits than float64, before a case is called wrong that three draws don't show right. A right plan is
one more draw, so that it changes a quantity more than all of them do once in 33 times, however changes are distributed: also
where most draws change nothing and a few move a number over an edge, as that of a router, or of weights and activations of
few bits."""

DECIDABLE = 0.1
"""The largest tolerance, relative to the quantity: the least error that a plan makes is a rank's share too
much or too little, 1/8 at tp = 8."""

VISIBLE = 0.5
"""The same where a plan is proved in float64 already, and fewer bits are to show what it does in those alone."""

CHAOTIC = 0.25
"""Where rounding hides a larger share of the gradients, three draws say too little of how large it may be."""

CHANCE = 4.0
"""|z| of one normal number is above 4 times the largest of three others once in 300 draws of a scalar; of a tensor, whose
mean square varies less, practically never."""


class Tolerance:
    """How two tensors are compared in one dtype, and what is rounding.

    Args:
        model: whole.
        logits: its largest, of which the shape counts.
        steps: of the optimizer.

    Attributes:
        exact: bounded in the worst case, in float64; else in probability.
        eps: of the dtype.
        decidable: the largest tolerance, relative to a quantity, that decides.
    """

    def __init__(self, model: nn.Module, logits: torch.Tensor, steps: int):
        self.eps = torch.finfo(logits.dtype).eps
        self.exact = logits.dtype == torch.float64
        self.decidable = DECIDABLE if self.exact else VISIBLE
        self._depth = depth(model, logits) * steps

    def units(self, ranks: int) -> float:
        """Return how many units a right plan may be off over so many ranks."""
        return self._depth if self.exact else CHANCE * (1 + ranks) ** 0.5

    def difference(self, value: torch.Tensor, expected: torch.Tensor) -> float:
        """Return how far `value` is from `expected`; infinite where shapes differ or something is not a number."""
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
        return self.eps * self.size(tensor)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype in which a tolerance would accept a wrong gradient."""
    if dtype not in (torch.float64, torch.float32):
        raise PlanError(
            f"dtype = {dtype}: its rounding is as large as many mistakes, so it proves nothing by itself: prove the plan in "
            "torch.float64 (or torch.float32), which is run in bfloat16 beside"
        )


def depth(model: nn.Module, logits: torch.Tensor) -> float:
    """Return how many roundings the order of sums can change from weights to gradients, in epsilons.

    Each matrix is contracted over its inputs in the forward and over its outputs in the backward;
    a weight's gradient is a sum over all tokens; attention, or a scan, sums over the sequence in
    every block; the softmax over the vocabulary. logits: [batch, sequence, vocabulary] in any order.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    contracted = sum(len(p) + p.numel() // max(len(p), 1) for p in matrices)
    *tokens, vocabulary = logits.shape
    count = torch.Size(tokens).numel()
    blocks = max(len(find_decoder(model, required=False).blocks), 1)
    return float(contracted + count + max(tokens, default=1) * blocks + vocabulary)


def perturb(model: nn.Module, seed: int) -> None:
    """Move each parameter of `model` by one rounding up or down; in fewer bits than float64 one in 8 elements.

    There every rounding within the model falls another way for any small change, as it does in a split model, whose
    weights are the same: the fewer of them move, the less is measured but that.
    """
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if not param.is_floating_point():  # codes, which no operator rounds
            continue
        sign = torch.randint(2, param.shape, generator=generator).to(param) * 2 - 1
        if param.dtype != torch.float64:
            sign *= torch.randint(8, param.shape, generator=generator).to(param) == 0
        with torch.no_grad():
            param.mul_(1 + torch.finfo(param.dtype).eps * sign)


def difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max|value - expected|; infinite where shapes differ or something is not a number."""
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
    be off by d. Then m is off by d at most, being a mean, and sqrt(v) too, being a norm of the gradients whose weights
    sum to 1. With |m| about sqrt(v) at most, the step so changes by 2 lr d / e at most, e being far above d in float64.

    Args:
        weight: after the steps.
        unit: the largest of its gradients.
        steps: of the optimizer.
        optimizer: for lr and e.
    """
    lr, e = optimizer.defaults["lr"], optimizer.defaults["eps"]
    return torch.finfo(weight.dtype).eps * largest(weight) + 2 * steps * lr * unit / e
