"""The plan of Gated Linear Attention, split by heads (Yang et al. 2023, arXiv:2312.06635)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("gla", mixer="fla.layers.gla.GatedLinearAttention")
class GLAPlan(MixerPlan):
    """Like the transformer's plan, except for the mixer.

    The forget gate is a low-rank product: `gk_proj.0` projects to 16 dimensions, and is replicated; `gk_proj.1` projects
    from there to the key/value heads. The output norm has one weight for all heads. The layer's code takes its head counts
    from its tensors, so `counts` is empty.
    """

    may_gather = True
    by_head = ("q_proj", "q_conv1d", "g_proj")
    by_shared_head = ("k_proj", "v_proj", "k_conv1d", "v_conv1d", "gk_proj.1")
    replicated = ("gk_proj.0", "g_norm", "g_norm_swish_gate")
