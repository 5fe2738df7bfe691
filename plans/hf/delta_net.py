"""The base plan of hybrids with transformers' Gated DeltaNet, split by value heads: Qwen3.5 and OLMo Hybrid."""

from typing import Any

from .llama import LlamaPlan


class ValueHeadsPlan(LlamaPlan):
    """The value heads of a group share a query and a key head, and so do ranks if there are fewer groups than ranks."""

    head_names = ("num_v_heads", "num_attention_heads")
    shared_head_names = ("num_k_heads", "num_key_value_heads")

    def local_attributes(self, attn: Any) -> dict[str, int]:
        if not hasattr(attn, "A_log"):
            return {}
        key_heads = self.heads_per_rank(attn.num_k_heads)
        return self.divide_by_degree(attn, "num_v_heads", "value_dim") | {
            "num_k_heads": key_heads,
            "key_dim": key_heads * attn.head_k_dim,
        }
