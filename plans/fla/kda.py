"""The plan of Kimi Delta Attention, split by heads (Kimi Team 2025, arXiv:2510.26692)."""

from titanplans import register_plan

from .gated_deltanet import GatedDeltaNetPlan


@register_plan("kda", mixer="fla.layers.kda.KimiDeltaAttention")
class KDAPlan(GatedDeltaNetPlan):
    """Like Gated DeltaNet, except for the two gates.

    Both gates are low-rank products. The first factor projects to the width of one head, and is replicated; the second
    factor projects from there to all heads.
    """

    by_head = ("v_proj", "v_conv1d", "f_proj.1", "b_proj", "g_proj.1", "A_log", "dt_bias")
    replicated = ("f_proj.0", "g_proj.0", "o_norm")
