"""The plans of Qwen3-Next and Qwen3.5: Gated DeltaNet and gated attention in one stack, Qwen2-MoE's experts."""

from typing import Any

from titanplans import Plan, register_plan

from .delta_net import ValueHeadsPlan
from .experts import ExpertsPlan
from .mixtral import Qwen2MoePlan
from .qwen import Qwen3Plan


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
            **self.attn_input(may_gather=True),  # the mixer's code sets padding to zero
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


@register_plan("qwen3_5_text")
class Qwen35Plan(ValueHeadsPlan, Qwen3Plan):
    """Gated DeltaNet is split by value heads, and value heads share the query and key heads of their group.

    In attention the rows of each head's query and gate are adjacent.
    """

    def attn_plan(self, attn: Any) -> Plan:
        if not hasattr(attn, "in_proj_qkv"):
            return super().attn_plan(attn) | {"q_proj": self.colwise(interleaved=True)}
        keys = self.shared_heads(attn.key_dim, attn.num_k_heads)
        by_head = ("in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias")
        return {
            **self.attn_input(may_gather=True),  # the mixer's code sets padding to zero
            "in_proj_qkv": self.packed(keys, keys, attn.value_dim),
            "conv1d": self.packed(keys, keys, attn.value_dim),
            **dict.fromkeys(by_head, self.colwise()),
            "norm": self.replicated_in_region(),
            "out_proj": self.rowwise(),
        }


@register_plan("lara_mini")
class LaraMiniPlan(ExpertsPlan, Qwen35Plan):
    """Mixers as in Qwen3.5, but attention has no gate; a shared expert without a gate."""

    shared_mlp = "shared_expert"

    def attn_plan(self, attn: Any) -> Plan:
        plan = super().attn_plan(attn)
        return plan if hasattr(attn, "in_proj_qkv") else plan | {"q_proj": self.colwise()}


@register_plan("qwen3_5_moe_text")
class Qwen35MoePlan(ExpertsPlan, Qwen35Plan):
    """Mixers as in the dense model, and Qwen2-MoE's experts."""

    shared_mlp = "shared_expert"
    in_region = ("shared_expert_gate",)
