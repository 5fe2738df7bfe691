"""The plans of OLMo 2, 3 and Hybrid: queries and keys are normed over all heads together."""

from typing import Any

from titanplans import Plan, register_plan

from .delta_net import ValueHeadsPlan
from .llama import LlamaPlan


@register_plan("olmo2", "olmo3")
class Olmo2Plan(LlamaPlan):
    """The norms' weights are sharded; a token's mean square is averaged over the ranks."""

    def attn_plan(self, attn: Any) -> Plan:
        keys = self.split_norm(heads=self.kv_heads(attn), rows=len(attn.k_norm.weight))
        return super().attn_plan(attn) | {"q_norm": self.split_norm(), "k_norm": keys}


@register_plan("olmo_hybrid")
class OlmoHybridPlan(ValueHeadsPlan, Olmo2Plan):
    """Gated DeltaNet, split by value heads, and attention in one stack."""

    def attn_plan(self, attn: Any) -> Plan:
        if not hasattr(attn, "A_log"):
            return super().attn_plan(attn)
        keys = self.shared_heads(attn.key_dim, attn.num_k_heads)
        by_value_head = ("v_proj", "a_proj", "b_proj", "g_proj", "A_log", "dt_bias")
        return {
            **self.attn_input(may_gather=True),  # the mixer's code sets padding to zero
            **dict.fromkeys(("q_proj", "k_proj"), self.kv_colwise(attn)),
            **dict.fromkeys(by_value_head, self.colwise()),
            "conv1d": self.packed(keys, keys, attn.value_dim),
            "o_norm": self.replicated_in_region(),
            "o_proj": self.rowwise(),
        }
