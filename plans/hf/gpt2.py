"""The plan of GPT-2: weights are [inputs, outputs]; queries, keys and values are packed; positions are learned.

GPT-BigCode and GPT-Neo have the same positions (`LearnedPositionsPlan`).
"""

from typing import Any

from torch import nn

from titanplans import Plan, TPPlan, register_plan


class LearnedPositionsPlan(TPPlan):
    """Positions are added before the stream begins. The stream ends at the final norm, since the model reshapes the norm's
    output."""

    mlp_in = ("c_fc",)
    mlp_out = "c_proj"

    def model_plan(self, model: nn.Module) -> Plan:
        return super().model_plan(model) | {
            "transformer.wte": self.vocab_embedding(all_tokens=True),
            "transformer.wpe": self.replicated_off_stream(),
            "transformer.ln_f": self.end_of_stream(),
        }


@register_plan("gpt2")
class GPT2Plan(LearnedPositionsPlan):
    """Projections are transformers' Conv1D, whose weights are [inputs, outputs]."""

    def attn_plan(self, attn: Any) -> Plan:
        width = attn.embed_dim
        return {
            **self.attn_input(),
            "c_attn": self.packed(width, width, width, dim=1),
            "c_proj": self.rowwise(dim=0),
        }

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return self.divide_by_degree(attn, "num_heads", "split_size", "c_attn.nf")

    def mlp_plan(self, mlp: nn.Module) -> Plan:
        return {**self.mlp_input(), "c_fc": self.colwise(dim=1), "c_proj": self.rowwise(dim=0)}

    def mlp_attributes(self, mlp: nn.Module) -> dict[str, int]:
        return self.divide_by_degree(mlp, "c_fc.nf")
