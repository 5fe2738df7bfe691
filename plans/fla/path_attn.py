"""The plan of PaTH attention, split by heads (Yang et al. 2025, arXiv:2505.16381)."""

from torch import nn

from titanplans import Plan, register_plan

from .mixer import MixerPlan


@register_plan("path_attn", mixer="fla.layers.path_attn.PaTHAttention")
class PaTHAttentionPlan(MixerPlan):
    """Householder directions belong to key/value heads; their projection is one Linear, or a low-rank product."""

    by_head = ("q_proj", "g_proj")
    by_shared_head = ("k_proj", "v_proj", "bt_proj", "w_conv1d")
    replicated = ("w_proj.0", "maybe_q_norm.weight", "maybe_k_norm.weight")

    def attn_plan(self, attn: nn.Module) -> Plan:
        low_rank = isinstance(attn.w_proj, nn.Sequential)
        return super().attn_plan(attn) | {"w_proj.1" if low_rank else "w_proj": self.kv_colwise(attn)}
