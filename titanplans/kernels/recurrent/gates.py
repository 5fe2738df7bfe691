"""CPU replacements for gates and cumulative sums that FLA's kernels compute before a recurrence."""

from typing import Any

import torch

from titanplans.kernels.layers.packing import sequences
from titanplans.kernels.precision import accumulation_dtype


def fused_additive_gate(
    x: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    gate_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return exp(x_t - z_t), z_(t-1) - z_t and the last z of each sequence, where z_t is the logsumexp of x_s, s <= t.

    Args:
        x: logits [B, T, H, K].
        initial_state: z before the first token, [N, 1, H, K] with N the number of packed sequences, or B. None: the first
            gate is 0.
        cu_seqlens: bounds of packed sequences.
        output_dtype: dtype of the first result; None: the dtype of x.
        gate_dtype: dtype of the second result; None: the dtype of x.
    """
    dtype = accumulation_dtype(x, initial_state)
    ks, gs, finals = [], [], []
    for n, sequence in sequences({"x": x.to(dtype)}, cu_seqlens):
        logits = sequence["x"]
        if initial_state is None:
            z = logits.logcumsumexp(1)
            before = torch.cat((z[:, :1], z[:, :-1]), 1)
        else:
            first = initial_state.to(dtype) if n is None else initial_state[n : n + 1].to(dtype)
            z = torch.cat((first, logits), 1).logcumsumexp(1)
            before, z = z[:, :-1], z[:, 1:]
        ks.append((logits - z).exp())
        gs.append(before - z)
        finals.append(z[:, -1:])
    k, g = torch.cat(ks, 1), torch.cat(gs, 1)
    return k.to(output_dtype or x.dtype), g.to(gate_dtype or x.dtype), torch.cat(finals)


def chunk_global_cumsum(
    s: torch.Tensor,
    reverse: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    **chunks: Any,
) -> torch.Tensor:
    """Return the cumulative sums over the tokens of s [B, T, ...].

    Args:
        s: the summands.
        reverse: sum from the last token to the first.
        cu_seqlens: bounds of packed sequences.
        scale: factor of the sums.
        output_dtype: dtype of the sums, but float64 for a float64 `s`. None: the dtype of s.
        chunks: sizes of the kernel's chunks; ignored.
    """
    wide = s.to(accumulation_dtype(s))
    by_sequence = [sequence["s"] for _, sequence in sequences({"s": wide}, cu_seqlens)]
    sums = torch.cat([x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1) for x in by_sequence], 1)
    sums = sums if scale is None else sums * scale
    if output_dtype is None:
        return sums.to(s.dtype)
    return sums.to(
        torch.promote_types(output_dtype, torch.float64) if s.dtype == torch.float64 else output_dtype
    )
