"""Helpers of all CPU kernels: the dtype in which they compute, and exclusion from graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def accumulation_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """Return float64 if an operand is float64, else float32, in which FLA's kernels accumulate."""
    return (
        torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
    )


def out_of_graphs(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decorator that keeps the replacement of `kernel` out of every graph, as FLA does with its kernels."""
    return partial(
        torch.compiler.disable, reason=f"{kernel.__name__} calls a kernel of flash-linear-attention"
    )


def any_dtype(x: torch.Tensor) -> torch.Tensor:
    """Return `x` unchanged. FLA casts inputs for flash-attn here; attention on a CPU takes any dtype."""
    return x


def without_autocast(like: torch.Tensor) -> torch.autocast:
    """Return a context without autocast on the device of `like`."""
    return torch.autocast("cpu" if like.is_meta else like.device.type, enabled=False)
