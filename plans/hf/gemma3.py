"""The plan of Gemma 3: the text model, and the one with a vision tower in front of it.

The two post norms of a block work on the output of attention and MLP, after the sum over the ranks,
so they stand on the stream as the other two do. Local and full attention differ in masks and
rotary tables only, which the model makes from whole embeddings.
"""

from torch import nn

from titanplans import Plan, register_plan

from .qwen import Qwen3Plan


@register_plan("gemma3_text")
class Gemma3Plan(Qwen3Plan):
    """Split as Qwen3 is."""


@register_plan("gemma3")
class Gemma3VisionPlan(Gemma3Plan):
    """The language model is split; every rank runs the whole vision tower and projector.

    Images are merged into whole embeddings, before the stream begins.
    """

    def model_plan(self, model: nn.Module) -> Plan:
        plan = super().model_plan(model)
        plan["model.language_model.embed_tokens"] = self.vocab_embedding(all_tokens=True)
        for part in ("model.vision_tower", "model.multi_modal_projector"):
            plan |= self.each_of(model, part, self.replicated_off_stream())
        return plan
