"""The plan of retention, its heads split (Sun et al. 2023, arXiv:2307.08621)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("retnet", mixer="fla.layers.multiscale_retention.MultiScaleRetention")
class RetNetPlan(MixerPlan):
    """A head decays by its number: of a rank's heads, by their numbers among all."""

    gathers = True
    by_head = ("q_proj", "q_conv1d", "g_proj")
    by_shared_head = ("k_proj", "v_proj", "k_conv1d", "v_conv1d")
    for_all_heads = ("g_norm", "g_norm_swish_gate")

    def local_functions(self, attn: nn.Module) -> Mapping[str, Callable[..., Any]]:
        kinds = ("chunk", "fused_chunk", "fused_recurrent", "parallel")
        return {f"{kind}_retention.{kind}_simple_gla": decayed for kind in kinds}


def decayed(simple_gla: Callable[..., Any], ranks: Any) -> Callable[..., Any]:
    """Return `simple_gla` with the decays of this rank's heads, for those of the first heads that retention gives it."""

    def local(q: torch.Tensor, **given: Any) -> Any:
        (name,) = given.keys() & {"g", "g_gamma"}
        heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device) + q.shape[2] * ranks.rank
        decays = (1 - 2.0 ** (-5.0 - heads)).log()
        return simple_gla(q=q, **given | {name: decays.expand(given[name].shape)})

    return local
