"""The plan of Nemotron-H: a block has one of Mamba 2, attention, an MLP or a mixture of experts."""

from typing import Any

from titanplans import Plan, register_plan

from .experts import ExpertsPlan
from .granite import HybridPlan


@register_plan("nemotron_h")
class NemotronHPlan(ExpertsPlan, HybridPlan):
    """All are called `mixer`. Neither MLPs nor experts have a gate."""

    mlp_in = ("up_proj",)
    shared_mlp = "shared_experts"

    def heads(self, attn: Any) -> dict[str, int]:
        if hasattr(attn, "A_log") or hasattr(attn, "k_proj"):
            return super().heads(attn)
        return {
            "intermediate_size": attn.experts.intermediate_dim
            if hasattr(attn, "experts")
            else attn.intermediate_size
        }

    def attn_plan(self, attn: Any) -> Plan:
        return (
            super().attn_plan(attn)
            if hasattr(attn, "A_log") or hasattr(attn, "k_proj")
            else self.mlp_plan(attn)
        )

    def stacked(self, experts: Any) -> Plan:
        return {
            "experts.up_proj": self.colwise(dim=1),
            "experts.down_proj": self.rowwise(reduce_output=False, dim=2),
        }
