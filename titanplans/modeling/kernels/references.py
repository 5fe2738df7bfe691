"""FLA's own references, for the adapter in `recurrence`, where they lack something that is theirs alone."""

import functools
from typing import Any

import torch
from fla.ops.cyfa import naive, utils
from fla.ops.path_attn.naive import naive_path_attn

from titanplans.modeling.kernels.packing import Result


@functools.wraps(naive.naive_recurrent_cyfa)
def cyfa(*args: Any, **kwargs: Any) -> Result:
    """Compute without a cache: it keeps a table by device alone, not by dtype, and would keep one of simulated ranks."""
    utils._readout_basis.cache_clear()
    try:
        return naive.naive_recurrent_cyfa(*args, **kwargs)
    finally:
        utils._readout_basis.cache_clear()


def path_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    scale: float,
    chunk_size: int = 64,
    use_cache: bool = False,
) -> Result:
    """Return FLA's outputs and, on request, the keys [B, T, H, K] as the last token sees them, for decoding."""
    o = naive_path_attn(q, k, v, w, beta, g, scale, chunk_size=min(chunk_size, q.shape[1]))
    if not use_cache:
        return o, None
    for t in range(1, k.shape[1]):
        along = torch.einsum("bshk,bhk->bsh", k[:, :t], w[:, t])
        past = k[:, :t] - torch.einsum("bsh,bh,bhk->bshk", along, beta[:, t], w[:, t])
        k = torch.cat([past, k[:, t:]], 1)
    return o, k
