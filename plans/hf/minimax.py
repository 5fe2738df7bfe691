"""The plan of MiniMax-Text-01: lightning attention and softmax attention in one stack, with Mixtral's experts."""

from typing import Any

from titanplans import Plan, register_plan

from .experts import ExpertsPlan


@register_plan("minimax")
class MiniMaxPlan(ExpertsPlan):
    """Lightning attention has decays for each head, in buffers. Its output is normed over all heads."""

    def attn_plan(self, attn: Any) -> Plan:
        if not hasattr(attn, "slope_rate"):
            return super().attn_plan(attn)
        return {
            **self.attn_input(may_gather=True),  # the mixer's code sets padding to zero
            "qkv_proj": self.colwise(interleaved=True),
            "output_gate": self.colwise(),
            **dict.fromkeys(("slope_rate", "query_decay", "key_decay"), self.colwise()),
            "diagonal_decay": self.colwise(dim=1),
            "norm": self.split_norm(),
            "out_proj": self.rowwise(),
        }

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return self.divide_by_degree(attn, "num_attention_heads") if hasattr(attn, "slope_rate") else {}
