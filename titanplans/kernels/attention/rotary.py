"""Rotary position embeddings, as `RotaryEmbeddingFunction` in `fla/modules/rotary/ops.py` is called: by FLA's own reference.

The cosine and sine tables are FLA's: `RotaryEmbedding` computes them in float32 whatever the model's dtype, then
casts them to the dtype of the queries. With float64 queries the rotation is done in float64 on those tables.
"""

import torch

from titanplans.kernels.precision import accumulation_dtype


def rotary_embedding(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates the first 2R channels of x [B, T, H, D] by the tables cos, sin [positions, R].

    Channel pairs are (i, i + R), or (2i, 2i + 1) when `interleaved`. `seqlen_offsets` shifts positions, for all
    sequences or [N] for each; positions of sequences packed by `cu_seqlens` [N + 1] start anew. Where a
    shifted position is outside the tables (left padding) the rotated channels are zero. `chunk_indices` is the
    launch grid of a kernel and changes nothing.
    """
    from fla.modules.rotary.ops import rotary_embedding_ref

    dtype, rotated = accumulation_dtype(x), 2 * cos.shape[1]
    rows, inside = _rows(x, cos.shape[0], seqlen_offsets, cu_seqlens)
    y = rotary_embedding_ref(
        x[..., :rotated].to(dtype), cos.to(dtype)[rows], sin.to(dtype)[rows], interleaved
    )
    if inside is not None:
        y = y * inside[..., None, None]
    y = torch.cat((y.to(x.dtype), x[..., rotated:]), -1)
    return x.copy_(y) if inplace else y


def _rows(
    x: torch.Tensor, positions: int, offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[slice | torch.Tensor, torch.Tensor | None]:
    """The table's row for every token, and a mask of the rows that are in the table; None if all are."""
    seq_len = x.shape[1]
    if cu_seqlens is None and isinstance(offsets, int):
        return slice(offsets, offsets + seq_len), None
    steps = torch.arange(seq_len, device=x.device)
    if cu_seqlens is None:
        places = steps + torch.as_tensor(offsets)[:, None]
    else:
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), steps, right=True)
        shift = offsets if isinstance(offsets, int) else offsets[sequence]
        places = (steps - cu_seqlens[sequence] + shift).unsqueeze(0)
    return places.clamp(0, positions - 1), (places >= 0) & (places < positions)
