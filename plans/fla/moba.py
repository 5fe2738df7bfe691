"""The plan of mixture of block attention, split by heads (Lu et al. 2025, arXiv:2502.13189)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("moba", mixer="fla.layers.moba.MoBA")
class MoBAPlan(MixerPlan):
    """Each head chooses its blocks; the output gate is a low-rank product, like GLA's forget gate."""

    by_head = ("q_proj", "g_proj.1")
    by_shared_head = ("k_proj", "v_proj")
    replicated = ("q_norm", "k_norm", "g_proj.0", "o_norm")
