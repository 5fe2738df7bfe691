"""The plan of LightNet, split by heads (Qin et al. 2024, arXiv:2405.21022)."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .mixer import MixerPlan


@register_plan("lightnet", mixer="fla.layers.lightnet.LightNetAttention")
class LightNetPlan(MixerPlan):
    """A gated RMSNorm over all heads is fused with `o_proj`; the ranks sum one number per token for this norm."""

    may_gather = True
    by_head = ("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "g_proj.1")
    replicated = ("g_proj.0",)

    def attn_plan(self, attn: nn.Module) -> Plan:
        return super().attn_plan(attn) | {"g_norm": self.split_norm()}

    def local_functions(self, attn: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return {"rms_norm_swish_gate_linear": self.full_width_norm}
