"""The plan of GPT-BigCode: SantaCoder and StarCoder, with one key/value head."""

from typing import Any

from titanplans import Plan, register_plan

from .gpt2 import LearnedPositionsPlan


@register_plan("gpt_bigcode")
class GPTBigCodePlan(LearnedPositionsPlan):
    """All ranks share the key/value head."""

    def attn_plan(self, attn: Any) -> Plan:
        queries = (
            self.packed(attn.embed_dim, self.shared_heads(2 * attn.kv_dim))
            if attn.multi_query
            else self.colwise(interleaved=True)
        )
        return {**self.attn_input(), "c_attn": queries, "c_proj": self.rowwise()}

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return self.divide_by_degree(attn, "embed_dim" if attn.multi_query else "num_heads")
