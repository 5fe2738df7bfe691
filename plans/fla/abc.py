"""The plan of attention with bounded-memory control, split by heads (Peng et al. 2021, arXiv:2110.02488)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("abc", mixer="fla.layers.abc.ABCAttention")
class ABCPlan(MixerPlan):
    """Each head has its own slots."""

    by_head = ("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "s_proj", "g_proj")
    replicated = ("g_norm",)
