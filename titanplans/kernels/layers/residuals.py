"""CPU replacement for attention residuals (`attnres_block_size` in FLA's configs), a weighted sum of block outputs.

FLA's reference `naive_attnres` is not used, since it accepts only contiguous residuals.
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
    """Return the softmax-weighted sum of L residuals [..., D] (arXiv:2603.15031).

    A residual's score is the product of `query` [D] with the residual after RMSNorm.

    With `output_rms_weight` [D] the sum is normalized again. With `return_weights` the weights [L, ...] are returned, too.
    `checkpoint_level`, which trades time for memory in the kernel, has no effect.
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
