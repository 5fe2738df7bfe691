"""The plans of decoders with packed projections: gate and up in GLM-4; also queries, keys and values in Phi-3."""

from typing import Any

from titanplans import Plan, register_plan

from .llama import LlamaPlan


@register_plan("glm", "glm4")
class Glm4Plan(LlamaPlan):
    """Gate and up are one projection."""

    def mlp_plan(self, mlp: Any) -> Plan:
        width = mlp.down_proj.in_features
        return {
            **self.mlp_input("hidden_states"),
            "gate_up_proj": self.packed(width, width),
            "down_proj": self.rowwise(),
        }


@register_plan("phi3")
class Phi3Plan(Glm4Plan):
    """Queries, keys and values are one projection, which the code splits by head counts."""

    def attn_plan(self, attn: Any) -> Plan:
        kv = attn.num_key_value_heads
        shared = self.shared_heads(kv * attn.head_dim, kv)
        queries = attn.config.num_attention_heads * attn.head_dim
        return {
            **self.attn_input(),
            "qkv_proj": self.packed(queries, shared, shared),
            "o_proj": self.rowwise(),
        }

    def local_attributes(self, attn: Any) -> dict[str, int]:
        kv = {"num_key_value_heads": self.heads_per_rank(attn.num_key_value_heads)}
        return self.divide_by_degree(attn, "config.num_attention_heads") | kv
