"""The plan of DeepSeek-V2, V3 and R1: latent attention, experts that are chosen by groups, and shared experts."""

from typing import Any

from titanplans import Plan, register_plan

from .experts import ExpertsPlan


@register_plan("deepseek_v2", "deepseek_v3")
class DeepseekPlan(ExpertsPlan):
    """Heads are split at the up-projections; every rank computes the full latents.

    The latents are narrow: in V3 1536 for queries, 512 for keys and values, and 64 for the rotary key, which all heads
    share.
    """

    shared_mlp = "shared_experts"
    balance = None  # V3's router has a bias instead, which the training loop updates

    def attn_plan(self, attn: Any) -> Plan:
        queries: Plan = {"q_proj": self.colwise()}
        if attn.q_proj is None:
            latent = dict.fromkeys(("q_a_proj", "q_a_layernorm"), self.replicated_in_region())
            queries = {**latent, "q_b_proj": self.colwise()}
        return {
            **self.attn_input(may_gather=True),  # its code splits the latents of keys and values
            **queries,
            "kv_a_proj_with_mqa": self.replicated_in_region(),
            "kv_a_layernorm": self.replicated_in_region(),
            "kv_b_proj": self.colwise(),
            "o_proj": self.rowwise(),
        }
