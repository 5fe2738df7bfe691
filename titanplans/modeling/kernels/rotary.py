"""Rotary position embeddings, forward and (with `conjugate`) backward, as `fla/modules/rotary/ops.py` calls them.

The cosine and sine tables are FLA's: `RotaryEmbedding` computes them in float32 whatever the model's dtype, then
casts them to the dtype of the queries. With float64 queries the rotation is done in float64 on those tables.
"""

import torch

from titanplans.modeling.kernels.precision import accumulation_dtype


def rotary_embedding_fwdbwd(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates the first 2R channels of x [B, T, H, D] by the tables cos, sin [positions, R].

    Channel pairs are (i, i + R), or (2i, 2i + 1) when `interleaved`. `seqlen_offsets` shifts positions, for all
    sequences or [N] for each; positions of sequences packed by `cu_seqlens` [N + 1] start anew. Where a
    shifted position is outside the tables (left padding) the rotated channels are zero. `chunk_indices` is the
    launch grid of a kernel and changes nothing.
    """
    dtype, rotated = accumulation_dtype(x), 2 * cos.shape[1]
    cos_TR, sin_TR, inside = _rows(cos.to(dtype), sin.to(dtype), x, seqlen_offsets, cu_seqlens)
    sin_TR = -sin_TR if conjugate else sin_TR
    channels = x[..., :rotated].to(dtype)
    first, second = (channels[..., ::2], channels[..., 1::2]) if interleaved else channels.chunk(2, dim=-1)
    pair = (first * cos_TR - second * sin_TR, first * sin_TR + second * cos_TR)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    if inside is not None:
        y = y * inside
    if inplace:
        x[..., :rotated] = y
        return x
    return torch.cat((y.to(x.dtype), x[..., rotated:]), -1)


def _rows(
    cos: torch.Tensor,
    sin: torch.Tensor,
    x: torch.Tensor,
    offsets: int | torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Table rows for every token, broadcastable to [B, T, H, R], and a mask of positions inside, None if all are."""
    seq_len = x.shape[1]
    steps = torch.arange(seq_len, device=x.device)
    if cu_seqlens is None and isinstance(offsets, int):
        rows = slice(offsets, offsets + seq_len)
        return cos[rows, None], sin[rows, None], None
    if cu_seqlens is None:
        positions = steps + torch.as_tensor(offsets)[:, None]
    else:
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), steps, right=True)
        shift = offsets if isinstance(offsets, int) else offsets[sequence]
        positions = (steps - cu_seqlens[sequence] + shift).unsqueeze(0)
    inside = (positions >= 0) & (positions < cos.shape[0])
    rows = positions.clamp(0, cos.shape[0] - 1)
    return cos[rows].unsqueeze(2), sin[rows].unsqueeze(2), inside[:, :, None, None]
