"""What all CPU kernels do alike: which dtype they compute in, and that they stay out of graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def accumulation_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 as soon as one operand is float64, else float32: FLA's kernels accumulate in float32.

    A proof in float64 must not pass through float32 on the way, and bfloat16 must not be summed in
    bfloat16.
    """
    return (
        torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
    )


def out_of_graphs(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decorator that keeps what stands in for `kernel` out of every graph, as FLA keeps its kernels."""
    return partial(
        torch.compiler.disable, reason=f"{kernel.__name__} calls a kernel of flash-linear-attention"
    )


def any_dtype(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, which FLA casts for flash-attn, for attention on a CPU, which takes any dtype."""
    return x


def without_autocast(like: torch.Tensor) -> torch.autocast:
    """Return the context in which products on the device of `like`, a CPU's or meta, keep their dtype."""
    return torch.autocast("cpu" if like.is_meta else like.device.type, enabled=False)
