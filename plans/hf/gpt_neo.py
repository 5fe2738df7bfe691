"""The plan of GPT-Neo: full attention and windows alternate; positions are learned."""

from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .ungated import Starcoder2Plan


@register_plan("gpt_neo")
class GPTNeoPlan(Starcoder2Plan):
    """A mixer holds its projections in a module `attention`. Positions are added before the stream begins.

    The stream ends at the final norm, whose output the model reshapes.
    """

    def model_plan(self, model: nn.Module) -> Plan:
        return super().model_plan(model) | {
            "transformer.wte": self.vocab_embedding(all_tokens=True),
            "transformer.wpe": self.replicated_off_stream(),
            "transformer.ln_f": self.end_of_stream(),
        }

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
