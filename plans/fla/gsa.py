"""The plan of gated slot attention, split by heads (Zhang et al. 2024, arXiv:2409.07146)."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .mixer import MixerPlan


@register_plan("gsa", mixer="fla.layers.gsa.GatedSlotAttention")
class GSAPlan(MixerPlan):
    """An RMSNorm over all heads is fused with `o_proj`; the ranks sum one number per token for this norm."""

    may_gather = True
    by_head = ("q_proj", "q_conv1d")
    by_shared_head = ("k_proj", "v_proj", "k_conv1d", "v_conv1d", "f_proj")
    replicated = ("feature_map.layer",)

    def attn_plan(self, attn: nn.Module) -> Plan:
        return super().attn_plan(attn) | {"g_norm": self.split_norm()}

    def local_functions(self, attn: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return {"rms_norm_linear": self.full_width_norm}
