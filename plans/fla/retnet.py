"""The plan of retention, split by heads (Sun et al. 2023, arXiv:2307.08621)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("retnet", mixer="fla.layers.multiscale_retention.MultiScaleRetention")
class RetNetPlan(MixerPlan):
    """A head's decay depends on its index among all heads, so each rank's kernel gets the decays of its heads."""

    may_gather = True
    by_head = ("q_proj", "q_conv1d", "g_proj")
    by_shared_head = ("k_proj", "v_proj", "k_conv1d", "v_conv1d")
    replicated = ("g_norm", "g_norm_swish_gate")

    def local_functions(self, attn: nn.Module) -> Mapping[str, Callable[..., Any]]:
        kinds = ("chunk", "fused_chunk", "fused_recurrent", "parallel")
        return {f"{kind}_retention.{kind}_simple_gla": with_local_decays for kind in kinds}


def with_local_decays(simple_gla: Callable[..., Any], ranks: Any) -> Callable[..., Any]:
    """Wrap `simple_gla` to use the decays of this rank's heads; retention would pass the decays of the first heads."""

    def local(q: torch.Tensor, **kwargs: Any) -> Any:
        (name,) = kwargs.keys() & {"g", "g_gamma"}
        heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device) + q.shape[2] * ranks.rank
        decays = (1 - 2.0 ** (-5.0 - heads)).log()
        return simple_gla(q=q, **kwargs | {name: decays.expand(kwargs[name].shape)})

    return local
