"""The plan of stick-breaking attention, split by heads (Tan et al. 2024, arXiv:2410.17980)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("stickbreaking_attn", mixer="fla.layers.stickbreaking_attn.StickBreakingAttention")
class StickBreakingPlan(MixerPlan):
    """Like the transformer's attention, except for the computation on the scores."""

    may_gather = True
    by_head = ("q_proj",)
    by_shared_head = ("k_proj", "v_proj")
    replicated = ("q_norm", "k_norm")
