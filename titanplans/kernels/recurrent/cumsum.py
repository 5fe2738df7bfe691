"""`chunk_global_cumsum` for a CPU: sums over the tokens of each packed sequence."""

from typing import Any

import torch

from titanplans.kernels.layers.packing import sequences
from titanplans.kernels.precision import accumulation_dtype


def chunk_global_cumsum(
    s: torch.Tensor,
    reverse: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    **chunks: Any,
) -> torch.Tensor:
    """Return the sums over the tokens of s [B, T, ...], from the first on, or from the last with `reverse`.

    Sums of float64 stay float64 where `output_dtype` is float32.

    Args:
        s: the summands.
        reverse: from the last token to the first.
        cu_seqlens: bounds of packed sequences.
        scale: factor of the sums.
        output_dtype: dtype of the sums; None: that of s.
        chunks: a kernel's chunks; ignored.
    """
    wide = s.to(accumulation_dtype(s))
    parts = [part["s"] for _, part in sequences({"s": wide}, cu_seqlens)]
    sums = torch.cat([x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1) for x in parts], 1)
    sums = sums if scale is None else sums * scale
    if output_dtype is None:
        return sums.to(s.dtype)
    return sums.to(
        torch.promote_types(output_dtype, torch.float64) if s.dtype == torch.float64 else output_dtype
    )
