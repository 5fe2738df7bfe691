"""The plan of DeltaNet, split by heads (Yang et al. 2024, arXiv:2406.06484)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("delta_net", mixer="fla.layers.delta_net.DeltaNet")
class DeltaNetPlan(MixerPlan):
    """Every parameter belongs to a head, except the output norm's weight, which all heads share."""

    may_gather = True
    by_head = ("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "b_proj", "g_proj")
    replicated = ("o_norm",)
