"""The plan of GPT-NeoX and Pythia: each head's query, key and value rows are adjacent in one projection."""

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
