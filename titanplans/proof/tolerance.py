"""How far a right plan may be from the whole model: the unit of a difference, and how many of them.

A split model computes the same sums in another order. By the backward error of a sum (Higham,
*Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 4.2), n terms added in any order
are the exact sum of terms moved by at most (n - 1) eps each, relatively; and what such a move of the
data does to the result is the result's condition, which is a matter of the model, not of the plan.
So a tolerance is a product of two things, neither of them guessed:

- The *unit* of a quantity t, its "epsilon", is measured on the whole model: the most that t changes
  when every weight is moved by one rounding, w (1 + eps xi) with xi = -1 or 1 at random, in a few
  such draws; and not less than eps max|t|, the rounding of t itself. A gradient that is zero but for
  rounding (a key bias's, which softmax cancels) so gets the unit that its rounding has.
- The *depth* is the number of roundings in which an order may differ along the longest path from the
  weights to a gradient, counted from shapes: see `depth`.

Both are generous in their own way: a bound adds up all roundings at their worst, while they cancel
in practice (a right plan shows about 1 epsilon, not the depth); a random draw may underrate the
worst direction, by less than that. A wrong placement, in float64, was off by 10^13 epsilons and more.

An AdamW step is different: where a gradient is rounding only, it moves the weight by a full step in
an arbitrary direction. How far is a formula of the gradient's own tolerance: see `step_unit`.
"""

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.tensor_parallel.decoder import find_decoder

DRAWS = 3
"""Perturbed runs of the whole model; the unit is the largest change in any of them."""

DECIDABLE = 0.1
"""The largest tolerance, relative to the quantity: the least error that a plan makes is a rank's share too
much or too little, 1/8 at tp = 8."""


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype in which a tolerance would accept a wrong gradient."""
    if dtype not in (torch.float64, torch.float32):
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 1
        raise PlanError(
            f"dtype = {dtype}: a sum of {round(1 / eps)} terms may be wrong by as much as it is large, so a tolerance for "
            "it would accept a wrong gradient: prove the plan in torch.float64 (or torch.float32)"
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


def perturb(model: nn.Module, weights: dict[str, torch.Tensor], seed: int) -> None:
    """Set each parameter of `model` to its value in `weights`, moved by one rounding up or down."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        sign = torch.randint(2, param.shape, generator=generator).to(param) * 2 - 1
        with torch.no_grad():
            param.copy_(weights[name] * (1 + torch.finfo(param.dtype).eps * sign))


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


def step_unit(
    weight: torch.Tensor,
    gradient: torch.Tensor | None,
    unit: float,
    tolerance: float,
    optimizer: torch.optim.AdamW,
) -> torch.Tensor:
    """Return the unit of each element of a weight after the first AdamW step.

    The first step is lr g / (|g| + e). Between the ends of what the gradient may be, g - d and g + d
    with d its tolerance, it changes by at most lr (f(|g| + d) - f(|g| - d)) with f(x) = x / (|x| + e),
    which rises with x; a `tolerance`-th of that is the unit, beside the rounding of the weight.

    Args:
        weight: before or after the step.
        gradient: the whole model's; None if there is none.
        unit: of the gradient.
        tolerance: of every quantity, in units.
        optimizer: the one that took the step, for lr and e.
    """
    own = torch.full_like(weight, torch.finfo(weight.dtype).eps * largest(weight))
    if gradient is None:
        return own
    lr, e = optimizer.defaults["lr"], optimizer.defaults["eps"]
    d = tolerance * unit
    high, low = gradient.abs() + d, gradient.abs() - d
    return own + lr * (high / (high.abs() + e) - low / (low.abs() + e)) / tolerance
