"""The plans of BLOOM and MPT: a bias for each head (ALiBi) in place of positions."""

from typing import Any

from torch import nn

from titanplans import Plan, TPPlan, register_plan

from .gpt_neox import GPTNeoXPlan


@register_plan("bloom")
class BloomPlan(GPTNeoXPlan):
    """The model makes the biases from all embeddings, which are normed before the first block."""

    def model_plan(self, model: nn.Module) -> Plan:
        return super().model_plan(model) | {
            "transformer.word_embeddings": self.vocab_embedding(all_tokens=True),
            "transformer.word_embeddings_layernorm": self.replicated_off_stream(),
        }

    def local_attributes(self, attn: nn.Module) -> dict[str, int]:
        return self.divide_by_degree(attn, "num_heads")

    def model_functions(self, model: Any):
        by_head = self.heads_of_result(model.config.n_head)
        # The second function makes the biases of batches with padding.
        return {"transformer._get_alibi_slopes": by_head, "transformer.build_alibi_tensor": by_head}


@register_plan("mpt")
class MptPlan(TPPlan):
    """The stream ends at the final norm of the model. Projections have no biases."""

    head_names = ("n_heads",)
    mlp_in = ("up_proj",)

    def attn_plan(self, attn: Any) -> Plan:
        width = attn.hidden_size
        return {**self.attn_input(), "Wqkv": self.packed(width, width, width), "out_proj": self.rowwise()}

    def local_attributes(self, attn: nn.Module) -> dict[str, int]:
        return self.divide_by_degree(attn, "n_heads")

    def model_functions(self, model: Any):
        return {"transformer.build_mpt_alibi_tensor": self.heads_of_result(model.config.n_heads)}
