"""The plans of GPT-NeoX, Pythia and Persimmon: each head's query, key and value rows are adjacent in one projection."""

from typing import Any

from torch import nn

from titanplans import Plan, TPPlan, register_plan


@register_plan("gpt_neox")
class GPTNeoXPlan(TPPlan):
    """Attention and MLP may be parallel, each in its own region; all projections have biases."""

    mlp_in = ("dense_h_to_4h",)
    mlp_out = "dense_4h_to_h"

    def attn_plan(self, attn: nn.Module) -> Plan:
        return {
            **self.attn_input(),
            "query_key_value": self.colwise(interleaved=True),
            "dense": self.rowwise(),
        }


@register_plan("persimmon")
class PersimmonPlan(GPTNeoXPlan):
    """Queries and keys are normed head by head."""

    def attn_plan(self, attn: Any) -> Plan:
        norms = ("q_layernorm", "k_layernorm") if attn.qk_layernorm else ()
        return super().attn_plan(attn) | dict.fromkeys(norms, self.replicated_in_region())

    def local_attributes(self, attn: nn.Module) -> dict[str, int]:
        return self.divide_by_degree(attn, "num_heads")
