"""The plan of GPT-BigCode: SantaCoder and StarCoder, with one key/value head."""

from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .ungated import Starcoder2Plan


@register_plan("gpt_bigcode")
class GPTBigCodePlan(Starcoder2Plan):
    """All ranks share the key/value head. Positions are added before the stream begins.

    The stream ends at the final norm, whose output the model reshapes.
    """

    def model_plan(self, model: nn.Module) -> Plan:
        return super().model_plan(model) | {
            "transformer.wte": self.vocab_embedding(all_tokens=True),
            "transformer.wpe": self.replicated_off_stream(),
            "transformer.ln_f": self.end_of_stream(),
        }

    def attn_plan(self, attn: Any) -> Plan:
        queries = (
            self.packed(attn.embed_dim, self.shared_heads(2 * attn.kv_dim))
            if attn.multi_query
            else self.colwise(interleaved=True)
        )
        return {**self.attn_input(), "c_attn": queries, "c_proj": self.rowwise()}

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return (
            self.divide_by_degree(attn, "embed_dim")
            if attn.multi_query
            else self.divide_by_degree(attn, "num_heads")
        )
