"""The plan of DeltaFormer, split by heads (arXiv:2505.19488)."""

from typing import Any

from titanplans import Plan, PlanError, register_plan

from .mixer import MixerPlan


@register_plan("deltaformer", mixer="fla.layers.deltaformer.DeltaFormerAttention")
class DeltaFormerPlan(MixerPlan):
    """Softmax attention. Each token first removes the content of earlier tokens from its value; `b_proj` determines how
    much."""

    by_head = ("q_proj", "k_proj", "v_proj", "b_proj")
    replicated = ("q_norm", "k_norm")

    def attn_plan(self, attn: Any) -> Plan:
        if attn.num_kv_heads != attn.num_heads:
            raise PlanError(
                f"num_kv_heads = {attn.num_kv_heads} with num_heads = {attn.num_heads}: flash-linear-attention's "
                "kernel of DeltaFormer needs as many key heads as query heads, split or not; set num_kv_heads = "
                "num_heads"
            )
        return super().attn_plan(attn)
