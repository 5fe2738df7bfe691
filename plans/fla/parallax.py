"""The plan of Parallax, split by heads (arXiv:2605.29157)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("parallax", mixer="fla.layers.parallax.Parallax")
class ParallaxPlan(MixerPlan):
    """Each head has a second query, `r_proj`."""

    by_head = ("q_proj", "r_proj")
    by_shared_head = ("k_proj", "v_proj")
    replicated = ("q_norm", "r_norm", "k_norm")
