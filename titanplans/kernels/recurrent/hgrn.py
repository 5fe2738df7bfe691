"""HGRN's operator on a CPU, h_t = exp(g_t) h_(t-1) + x_t."""

from typing import Any

import torch

from titanplans.kernels.layers.packing import Result, by_sequence
from titanplans.kernels.precision import accumulation_dtype
from titanplans.kernels.recurrent.chunks import scan


def hgrn(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> Result:
    """Outputs [B, T, D] of x and log gates g [B, T, D], and final states [N, D]."""
    dtype = accumulation_dtype(x, g, initial_state)
    inputs = {"x": x.to(dtype), "g": g.to(dtype)}
    state = None if initial_state is None else initial_state.to(dtype)

    def run(part: dict[str, torch.Tensor], states: dict[str, Any]) -> Result:
        return scan(part["x"], part["g"], states["state"])

    o, final = by_sequence(run, inputs, {"state": state}, cu_seqlens)
    return o.to(x.dtype), final if output_final_state else None
