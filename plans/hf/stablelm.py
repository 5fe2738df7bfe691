"""The plan of StableLM: attention stores its head counts, and may normalise each head with the head's own weights."""

from typing import Any

from titanplans import Plan, PlanError, register_plan

from .llama import LlamaPlan


@register_plan("stablelm")
class StableLmPlan(LlamaPlan):
    """Norms of heads (StableLM 2 12B) run on every rank, on gathered heads, since each head has its own norm module."""

    def attn_plan(self, attn: Any) -> Plan:
        plan = super().attn_plan(attn)
        if attn.qk_layernorm:
            degree = self.options.degrees.tp_cp
            if degree > attn.num_key_value_heads:
                raise PlanError(
                    f"qk_layernorm with num_key_value_heads = {attn.num_key_value_heads} below "
                    f"{self.options.name_degree(degree)}: the norms of heads that ranks share can't be split; choose a "
                    f"degree that divides {attn.num_key_value_heads}"
                )
            for name in ("q_layernorm", "k_layernorm"):
                plan[name] = self.gathered_in_region(dim=1)
                plan |= self.each_of(attn, f"{name}.norms", self.replicated_in_region())
        return plan

    def local_attributes(self, attn: Any) -> dict[str, int]:
        kv = {"num_key_value_heads": self.heads_per_rank(attn.num_key_value_heads)}
        return self.divide_by_degree(attn, "num_heads") | kv
