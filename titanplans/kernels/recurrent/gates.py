"""Gates that FLA's kernels compute before a recurrence, on a CPU."""

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
    """Return exp(x_t - z_t), z_(t-1) - z_t and the last z, where z_t is the logsumexp of x_s, s <= t.

    Args:
        x: logits [B, T, H, K].
        initial_state: z before the first token [N, 1, H, K], N the number of packed sequences, or B; None: the first gate
            is 0.
        cu_seqlens: bounds of packed sequences.
        output_dtype: of the first; None: that of x.
        gate_dtype: of the second; None: that of x.
    """
    dtype = accumulation_dtype(x, initial_state)
    ks, gs, finals = [], [], []
    for n, part in sequences({"x": x.to(dtype)}, cu_seqlens):
        logits = part["x"]
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
