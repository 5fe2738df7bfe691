"""The plan of DeltaFormer, its heads split (arXiv:2505.19488)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("deltaformer", mixer="fla.layers.deltaformer.DeltaFormerAttention")
class DeltaFormerPlan(MixerPlan):
    """Softmax attention to values from which each token has removed what earlier ones hold; `b_proj` says how much."""

    by_head = ("q_proj", "b_proj")
    by_shared_head = ("k_proj", "v_proj")
    for_all_heads = ("q_norm", "k_norm")
