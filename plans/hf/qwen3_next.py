"""The plan of Qwen3-Next: Gated DeltaNet and gated attention in one stack, Qwen2-MoE's experts."""

from typing import Any

from titanplans import Plan, register_plan

from .mixtral import Qwen2MoePlan


@register_plan("qwen3_next")
class Qwen3NextPlan(Qwen2MoePlan):
    """Gated DeltaNet is split by key heads: in its projections each key head's query, key, values and gates are adjacent.

    In attention the rows of each head's query and gate are adjacent.
    """

    head_names = ("num_k_heads", "num_attention_heads")

    def attn_plan(self, attn: Any) -> Plan:
        by_head = self.colwise(interleaved=True)
        if not hasattr(attn, "in_proj_qkvz"):
            norms = {"q_norm": self.replicated_in_region(), "k_norm": self.replicated_in_region()}
            return super().attn_plan(attn) | norms | {"q_proj": by_head}
        return {
            **self.attn_input(may_gather=True),  # its code sets padding to zero
            "in_proj_qkvz": by_head,
            "in_proj_ba": by_head,
            "conv1d": self.packed(attn.key_dim, attn.key_dim, attn.value_dim),
            "A_log": self.colwise(),
            "dt_bias": self.colwise(),
            "norm": self.replicated_in_region(),
            "out_proj": self.rowwise(),
        }

    def local_attributes(self, attn: Any) -> dict[str, int]:
        counts = (
            ("num_k_heads", "num_v_heads", "key_dim", "value_dim") if hasattr(attn, "in_proj_qkvz") else ()
        )
        return self.divide_by_degree(attn, *counts)
