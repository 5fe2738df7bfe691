"""The plans of Gemma 3: the text model, and the model with a vision tower; and of Gemma 4's text model.

A block's two post norms work on the output of attention and MLP after the sum over the ranks, so they are on the stream,
too. Local and full attention differ only in masks and rotary tables, which the model makes from full embeddings.
"""

from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .qwen import Qwen3Plan


@register_plan("gemma3_text")
class Gemma3Plan(Qwen3Plan):
    """Split as Qwen3 is."""


@register_plan("gemma3")
class Gemma3VisionPlan(Gemma3Plan):
    """The language model is split; every rank runs the vision tower and the projector unsplit.

    Images are merged into the full embeddings, before the stream begins.
    """

    def model_plan(self, model: nn.Module) -> Plan:
        plan = super().model_plan(model)
        plan["model.language_model.embed_tokens"] = self.vocab_embedding(all_tokens=True)
        for name in ("model.vision_tower", "model.multi_modal_projector"):
            plan |= self.each_of(model, name, self.replicated_off_stream())
        return plan


@register_plan("gemma4_text")
class Gemma4Plan(Gemma3Plan):
    """Each block gets a projection of per-layer embeddings, which every rank computes for all tokens.

    Blocks may use the keys and values of an earlier block, or keys as values; then they have no projections of their own.
    """

    def model_plan(self, model: Any) -> Plan:
        plan = super().model_plan(model)
        if model.config.get_text_config().hidden_size_per_layer_input:
            plan["model.embed_tokens"] = self.vocab_embedding(all_tokens=True)
            for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"):
                plan[f"model.{name}"] = self.replicated_off_stream()
        return plan

    def attn_plan(self, attn: Any) -> Plan:
        plan = super().attn_plan(attn)
        return {
            name: style for name, style in plan.items() if not name or getattr(attn, name, None) is not None
        }

    def heads(self, attn: Any) -> dict[str, int]:
        sizes = attn.config.per_layer_config[attn.layer_idx]
        names = (
            ("num_attention_heads",)
            if attn.is_kv_shared_layer
            else ("num_attention_heads", "num_key_value_heads")
        )
        return {name: getattr(sizes, name) for name in names}

    def local_attributes(self, attn: Any) -> dict[str, int]:
        if not attn.is_kv_shared_layer:
            return {}
        sizes = attn.config.per_layer_config[attn.layer_idx]
        queries, keys = map(self.heads_per_rank, (sizes.num_attention_heads, sizes.num_key_value_heads))
        return {"num_key_value_groups": queries // keys}

    def layer_plan(self, layer: Any) -> Plan:
        plan = super().layer_plan(layer)
        if layer.hidden_size_per_layer_input:
            names = ("per_layer_input_gate", "per_layer_projection")
            plan |= dict.fromkeys(names, self.replicated_on_stream())
            plan[""] = self.stream_arguments("per_layer_input")
        return plan
