"""Which dtype a CPU kernel computes in: one rule for all of them."""

import torch


def accumulation_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 as soon as one operand is float64, else float32: FLA's kernels accumulate in float32.

    A proof in float64 must not pass through float32 on the way, and bfloat16 must not be summed in
    bfloat16.
    """
    return (
        torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
    )


def any_dtype(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, which FLA casts for flash-attn, for attention on a CPU, which takes any dtype."""
    return x
