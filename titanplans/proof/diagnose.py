"""What is wrong with a tensor, where its values say so for certain."""

import math

import torch

from titanplans.proof.tolerance import difference


def diagnose(
    value: torch.Tensor, held: list[torch.Tensor] | None, expected: torch.Tensor, allowed: float, ranks: int
) -> str:
    """Return what is wrong with `value` in words, or nothing.

    Args:
        value: whole, as the next one to read it has it.
        held: what each rank has before any sum over the ranks, if each has something of that shape.
        expected: the right one.
        allowed: the largest difference that is rounding.
        ranks: the degree.
    """
    if value.shape != expected.shape:
        return f"of shape {tuple(value.shape)}, not {tuple(expected.shape)}"
    if not value.any():
        return "all zeros"
    if held is not None and difference(torch.stack(held).sum(0), expected) <= allowed:
        return "each rank has its own share: not summed over the ranks"
    ratio = ((value * expected).sum() / (expected * expected).sum()).item()
    if not math.isfinite(ratio) or difference(value, expected * ratio) > allowed * max(1.0, abs(ratio)):
        return ""
    if math.isclose(ratio, ranks, rel_tol=1e-3):
        return f"exactly {ranks} times too large: once for each rank"
    if math.isclose(ratio, 1 / ranks, rel_tol=1e-3):
        return f"exactly 1/{ranks} of it: divided by the number of ranks"
    return f"exactly {ratio:.4g} times the right one"
