"""The plan of Falcon: one packed projection, in one of three row orders."""

from typing import Any

from titanplans import Plan, register_plan

from .gpt_neox import GPTNeoXPlan


@register_plan("falcon")
class FalconPlan(GPTNeoXPlan):
    """Falcon-7B has one key/value head, which all ranks share; other models pack rows head by head, or group by group."""

    def attn_plan(self, attn: Any) -> Plan:
        plan = super().attn_plan(attn)
        if attn.num_kv_heads == 1 and not attn.new_decoder_architecture:
            shared = self.shared_heads(attn.head_dim)
            plan["query_key_value"] = self.packed(attn.hidden_size, shared, shared)
        return plan

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return self.divide_by_degree(attn, "num_heads") | {
            "num_kv_heads": self.heads_per_rank(attn.num_kv_heads)
        }

    def model_functions(self, model: Any):
        return (
            {"transformer.build_alibi_tensor": self.heads_of_result(model.config.num_attention_heads)}
            if model.config.alibi
            else {}
        )
