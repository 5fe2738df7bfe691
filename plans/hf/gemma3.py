"""The plans of Gemma 3: the text model, and the model with a vision tower.

A block's two post norms work on the output of attention and MLP after the sum over the ranks, so they are on the stream,
too. Local and full attention differ only in masks and rotary tables, which the model makes from full embeddings.
"""

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
