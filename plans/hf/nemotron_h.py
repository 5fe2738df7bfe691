"""The plan of Nemotron-H: a block has one of Mamba 2, attention, an MLP or a mixture of experts."""

from typing import Any

from titanplans import Plan, register_plan

from .experts import ExpertsPlan
from .granite import BambaPlan


@register_plan("nemotron_h")
class NemotronHPlan(ExpertsPlan, BambaPlan):
    """Whatever a block has, it is called `mixer`. Neither MLPs nor experts have a gate."""

    mlp_in = ("up_proj",)
    shared_mlp = "shared_experts"

    def heads(self, attn: Any) -> dict[str, int]:
        if _mixes_tokens(attn):
            return super().heads(attn)
        width = attn.experts.intermediate_dim if hasattr(attn, "experts") else attn.intermediate_size
        return {"intermediate_size": width}

    def attn_plan(self, attn: Any) -> Plan:
        return super().attn_plan(attn) if _mixes_tokens(attn) else self.mlp_plan(attn)

    def stacked(self, experts: Any) -> Plan:
        return {
            "experts.up_proj": self.colwise(dim=1),
            "experts.down_proj": self.rowwise(reduce_output=False, dim=2),
        }


def _mixes_tokens(mixer: Any) -> bool:
    return hasattr(mixer, "A_log") or hasattr(mixer, "k_proj")
