"""HGRN's operator on a CPU, h_t = exp(g_t) h_(t-1) + x_t, by FLA's reference."""

from typing import Any

import torch

from titanplans.modeling.kernels.packing import Result, by_sequence
from titanplans.modeling.kernels.precision import accumulation_dtype
from titanplans.proof.modes import Widen


def hgrn(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> Result:
    """Outputs [B, T, D] of x and log gates g [B, T, D], and final states [N, D]."""
    from fla.ops.hgrn.naive import naive_recurrent_hgrn

    dtype = accumulation_dtype(x, g, initial_state)

    def run(part: dict[str, torch.Tensor], states: dict[str, Any]) -> Result:
        with Widen(dtype):
            o, final = naive_recurrent_hgrn(
                part["x"].to(dtype), part["g"], states["initial"], output_final_state
            )
        return o, final

    o, final = by_sequence(run, {"x": x, "g": g}, {"initial": initial_state}, cu_seqlens)
    return o.to(x.dtype), final
