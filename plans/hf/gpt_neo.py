"""The plan of GPT-Neo: full attention and windows alternate; positions are learned."""

from typing import Any

from titanplans import Plan, register_plan

from .gpt2 import LearnedPositionsPlan


@register_plan("gpt_neo")
class GPTNeoPlan(LearnedPositionsPlan):
    """A mixer holds its projections in a module `attention`."""

    def attn_plan(self, attn: Any) -> Plan:
        by_head = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
        return {
            **self.attn_input(),
            **dict.fromkeys(by_head, self.colwise()),
            "attention.out_proj": self.rowwise(),
        }

    def heads(self, attn: Any) -> dict[str, int]:
        return {"num_heads": attn.attention.num_heads}

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return self.divide_by_degree(attn, "attention.num_heads")
