"""Attention residuals (`attnres_block_size` in FLA's configs): the mix of earlier blocks' outputs, on a CPU.

Not FLA's own `naive_attnres`, which takes contiguous residuals only.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from titanplans.kernels.precision import accumulation_dtype


@torch.compiler.disable
def fused_attnres(
    query: torch.Tensor,
    residuals: Sequence[torch.Tensor],
    rms_weight: torch.Tensor,
    output_rms_weight: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax-weighted sum of L residuals [..., D], scored by `query` [D] on their RMS norms (arXiv:2603.15031).

    Normalised once more by `output_rms_weight` [D] if given. With `return_weights` the weights [L, ...] come second.
    `checkpoint_level` trades a kernel's memory for time; here autograd chooses the tensors to keep.
    """
    dtype = accumulation_dtype(query, rms_weight, *residuals)
    stacked = torch.stack([r.to(dtype) for r in residuals])
    width = stacked.shape[-1:]
    scores = F.rms_norm(stacked, width, rms_weight.flatten().to(dtype), rms_eps) @ (
        query.flatten().to(dtype) * scale
    )
    weights = scores.softmax(0)
    mixed = (weights.unsqueeze(-1) * stacked).sum(0)
    if output_rms_weight is not None:
        mixed = F.rms_norm(mixed, width, output_rms_weight.to(dtype), rms_eps)
    mixed = mixed.to(residuals[0].dtype)
    return (mixed, weights) if return_weights else mixed
