"""The plans of latent attention: DeepSeek-V2, V3, V3.2, GLM-5, and smaller models with or without experts."""

from typing import Any

from titanplans import Plan, register_plan

from .experts import ExpertsPlan


@register_plan("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "sarvam_mla", "youtu", "minicpm3")
class DeepseekPlan(ExpertsPlan):
    """Heads are split at the up-projections; every rank computes the full latents.

    Experts are chosen by groups, and V3's router has a bias that the training loop updates. The latents are narrow: in V3
    1536 for queries, 512 for keys and values, and 64 for the rotary key, which all heads share.
    """

    shared_mlp = "shared_experts"

    def attn_plan(self, attn: Any) -> Plan:
        queries: Plan = {"q_proj": self.colwise()}
        if getattr(attn, "q_proj", None) is None:
            latent = dict.fromkeys(("q_a_proj", "q_a_layernorm"), self.replicated_in_region())
            queries = {**latent, "q_b_proj": self.colwise()}
        return {
            **self.attn_input(may_gather=True),  # the mixer's code splits the latents of keys and values
            **queries,
            "kv_a_proj_with_mqa": self.replicated_in_region(),
            "kv_a_layernorm": self.replicated_in_region(),
            "kv_b_proj": self.colwise(),
            "o_proj": self.rowwise(),
        }


@register_plan("deepseek_v32", "glm_moe_dsa")
class DeepseekSparsePlan(DeepseekPlan):
    """An indexer, which every rank computes in full, chooses the keys that all heads attend to."""

    def attn_plan(self, attn: Any) -> Plan:
        # A block may use the keys that an earlier block has chosen; then it has no indexer.
        has_indexer = getattr(attn, "indexer", None) is not None
        indexer = self.each_of(attn, "indexer", self.replicated_in_region()) if has_indexer else {}
        return super().attn_plan(attn) | indexer


@register_plan("hy_v4")
class HYV4Plan(DeepseekSparsePlan):
    """The stream has several copies of the hidden states, which replicated weights mix before and after each sublayer.

    Attention has sinks, and a gate for each of its outputs.
    """

    def model_plan(self, model: Any) -> Plan:
        return super().model_plan(model) | {
            "model.embed_tokens": self.vocab_embedding(all_tokens=True),
            "model.hc_head": self.replicated_on_stream(),
        }

    def layer_plan(self, layer: Any) -> Plan:
        plan = super().layer_plan(layer)
        for name in ("attn_hc", "ffn_hc"):
            plan |= self.each_of(layer, name, self.replicated_on_stream())
        return plan

    def attn_plan(self, attn: Any) -> Plan:
        return super().attn_plan(attn) | dict.fromkeys(("sinks", "gate_proj"), self.colwise())
