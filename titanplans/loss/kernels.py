"""Triton kernels for the softmax statistics of logits and for their gradient. Start at `read`.

Logits are read twice and written once, in their own dtype; torch's operators pass over them six times, in float32. The sum
of exponentials is computed online, with the largest logit so far (Milakov and Gimelshein, arXiv 1805.02867).
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from titanplans.loss.operators import Statistics

COLUMNS = 4096
"""Logits that a program processes at once."""


@triton.jit
def _statistics(
    logits, at, log_sums, label_logits, sums, width, stride, COLUMNS: tl.constexpr, SUM: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    wide = log_sums.dtype.element_ty
    largest = tl.full((), float("-inf"), wide)
    total = tl.zeros((), wide)
    plain = tl.zeros((), wide)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = tl.load(logits + columns, mask=columns < width, other=float("-inf")).to(wide)
        larger = tl.maximum(largest, tl.max(x, 0))
        # If all logits so far are -inf, avoid -inf - -inf.
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - finite) + tl.sum(tl.exp(x - finite), 0)
        largest = larger
        if SUM:
            plain += tl.sum(tl.where(columns < width, x, 0.0), 0)
    tl.store(log_sums + row, largest + tl.log(total))
    label = tl.load(at + row)
    tl.store(label_logits + row, tl.load(logits + label, mask=label >= 0, other=0.0).to(wide))
    if SUM:
        tl.store(sums + row, plain)


@triton.jit
def _gradient(logits, at, log_sums, scales, at_labels, shifts, width, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(logits + columns, mask=columns < width, other=0.0).to(log_sums.dtype.element_ty)
    gradient = tl.exp(x - tl.load(log_sums + row)) * tl.load(scales + row) - tl.load(shifts + row)
    gradient -= tl.where(columns == tl.load(at + row), tl.load(at_labels + row), 0.0)
    tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < width)


def read(
    logits: torch.Tensor, mine: torch.Tensor, index: torch.Tensor, summed: bool
) -> tuple[Statistics, Callable[..., torch.Tensor]]:
    """Compute the same as `read_by_operators`, except that the gradient overwrites `logits` whatever their dtype.

    If the last stride of `logits` is not 1, the gradient overwrites a contiguous copy instead.
    """
    rows, width = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    wide = {"dtype": torch.promote_types(logits.dtype, torch.float32), "device": logits.device}
    at = torch.where(mine, index, -1)
    log_sum, label_logit, sums = (torch.empty(rows, **wide) for _ in range(3))  # type: ignore[arg-type]
    _run(_statistics, (rows,), logits, at, log_sum, label_logit, sums, width, logits.stride(0), SUM=summed)

    def gradient(log_sum: torch.Tensor, scale: torch.Tensor, at_label: torch.Tensor, shift: torch.Tensor):
        grid = (rows, -(-width // COLUMNS))
        _run(_gradient, grid, logits, at, log_sum, scale, at_label, shift, width, logits.stride(0))
        return logits

    return (log_sum, label_logit, sums if summed else None), gradient


def _run(kernel: Any, grid: tuple[int, ...], logits: torch.Tensor, *args: Any, **constants: Any) -> None:
    if all(grid):  # an empty grid can't be launched
        with torch.cuda.device_of(logits):
            kernel[grid](logits, *args, COLUMNS=COLUMNS, num_warps=8, **constants)
