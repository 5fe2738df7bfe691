"""The Newton-Schulz iteration of Muon on stacks of matrices, and how its update is scaled.

torch.optim.Muon has it for one matrix at a time (Keller Jordan, kellerjordan.github.io/posts/muon); the arithmetic is the
same here, in bfloat16, so a matrix may also be sent in bfloat16 without losing anything.
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
"""By the names of torch's `adjust_lr_fn`: the factor by which the update of a matrix [rows, columns] is multiplied."""


def orthogonalize(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Return U S V^T of each matrix for its U D V^T, in bfloat16; S is 1 but for about a half (of five steps).

    Args:
        matrices: [rows, columns], or a stack [matrices, rows, columns].
        steps: of the iteration.
    """
    a, b, c = _COEFFICIENTS
    fused = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    # The largest singular value is then 1 at most. A new tensor: what came may be the momentum itself.
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = fused(x, fused(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
