"""Muon's Newton-Schulz iteration for a matrix or a stack of matrices, and the scales of its update.

The iteration computes the same as torch.optim.Muon, which takes one matrix at a time (Keller Jordan,
kellerjordan.github.io/posts/muon). It computes in bfloat16, so sending a matrix in bfloat16 does not change the result.
"""

import math
from collections.abc import Callable

import torch

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_EPS = 1e-7

SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""The factor of the update of a matrix [rows, columns], by the values of torch's `adjust_lr_fn`."""


def orthogonalize(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Orthogonalise each matrix: from U D V^T to U S V^T, where S is about 0.5 to 1.5 after five steps. In bfloat16.

    Args:
        matrices: [rows, columns], or a stack [matrices, rows, columns].
        steps: the number of iterations.
    """
    a, b, c = _COEFFICIENTS
    fused = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    # After this division the largest singular value is at most 1. Not in place: `matrices` may be the momentum buffer.
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = fused(x, fused(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
