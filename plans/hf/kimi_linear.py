"""The plan of Kimi Linear: Kimi Delta Attention and latent attention in one stack, with DeepSeek-V3's experts."""

from typing import Any

from titanplans import Plan, register_plan

from .deepseek import DeepseekPlan


@register_plan("kimi_linear")
class KimiLinearPlan(DeepseekPlan):
    """Both mixers are split by heads. Every rank computes the low-rank inputs of the forget gate and the output gate."""

    def attn_plan(self, attn: Any) -> Plan:
        if not hasattr(attn, "forget_gate"):
            return super().attn_plan(attn)
        by_head = (
            "q_proj",
            "k_proj",
            "v_proj",
            "b_proj",
            "g_b_proj",
            "forget_gate.f_b_proj",
            "forget_gate.dt_bias",
        )
        by_all_heads = ("g_a_proj", "forget_gate.f_a_proj", "o_norm")
        return {
            **self.attn_input(may_gather=True),  # the mixer's code sets padding to zero
            **dict.fromkeys(by_head, self.colwise()),
            "forget_gate.A_log": self.colwise(dim=2),
            "conv1d": self.packed(attn.qkv_dim, attn.qkv_dim, attn.qkv_dim),
            **dict.fromkeys(by_all_heads, self.replicated_in_region()),
            "o_proj": self.rowwise(),
        }

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return self.divide_by_degree(attn, "num_heads", "qkv_dim") if hasattr(attn, "forget_gate") else {}
