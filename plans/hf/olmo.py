"""The plan of OLMo 2 and 3: queries and keys are normed over all heads together."""

from typing import Any

from titanplans import Plan, register_plan

from .llama import LlamaPlan


@register_plan("olmo2", "olmo3")
class Olmo2Plan(LlamaPlan):
    """The norms' weights are sharded; a token's mean square is averaged over the ranks."""

    def attn_plan(self, attn: Any) -> Plan:
        keys = self.split_norm(heads=self.kv_heads(attn), rows=len(attn.k_norm.weight))
        return super().attn_plan(attn) | {"q_norm": self.split_norm(), "k_norm": keys}
