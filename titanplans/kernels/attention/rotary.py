"""CPU replacement for `RotaryEmbeddingFunction` in `fla/modules/rotary/ops.py`, which calls FLA's reference.

FLA's `RotaryEmbedding` computes the cosine and sine tables in float32 and casts them to the dtype of the queries. With
float64 queries the rotation is in float64, but the tables have the precision of float32.
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
    """Rotate the first 2R channels of x [B, T, H, D] by the tables cos, sin [positions, R].

    Args:
        x: queries or keys.
        cos: cosines.
        sin: sines.
        interleaved: rotate pairs (2i, 2i + 1) of channels instead of (i, i + R).
        inplace: write the result into `x`.
        seqlen_offsets: added to the positions of all sequences, or [N] for each. If a position is then outside of the
            tables, as in left padding, the rotated channels are zero.
        cu_seqlens: bounds [N + 1] of packed sequences, each with positions from 0.
        chunk_indices: the kernel's launch grid; has no effect.
    """
    from fla.modules.rotary.ops import rotary_embedding_ref

    dtype, rotated = accumulation_dtype(x), 2 * cos.shape[1]
    positions, mask = _positions(x, cos.shape[0], seqlen_offsets, cu_seqlens)
    y = rotary_embedding_ref(
        x[..., :rotated].to(dtype), cos.to(dtype)[positions], sin.to(dtype)[positions], interleaved
    )
    if mask is not None:
        y = y * mask[..., None, None]
    y = torch.cat((y.to(x.dtype), x[..., rotated:]), -1)
    return x.copy_(y) if inplace else y


def _positions(
    x: torch.Tensor, table_length: int, offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[slice | torch.Tensor, torch.Tensor | None]:
    """Return each token's position, clamped to the table, and a mask that is True where the position is in the table.

    The mask is None if all tokens have their position in the table.
    """
    seq_len = x.shape[1]
    if cu_seqlens is None and isinstance(offsets, int):
        return slice(offsets, offsets + seq_len), None
    steps = torch.arange(seq_len, device=x.device)
    if cu_seqlens is None:
        positions = steps + torch.as_tensor(offsets)[:, None]
    else:
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), steps, right=True)
        shift = offsets if isinstance(offsets, int) else offsets[sequence]
        positions = (steps - cu_seqlens[sequence] + shift).unsqueeze(0)
    return positions.clamp(0, table_length - 1), (positions >= 0) & (positions < table_length)
