"""The plan of MesaNet, split by heads (von Oswald et al. 2025, arXiv:2506.05233)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("mesa_net", mixer="fla.layers.mesa_net.MesaNet")
class MesaNetPlan(MixerPlan):
    """Every parameter belongs to a head, except the output norm's weight, which all heads share."""

    may_gather = True
    by_head = (
        *("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d"),
        *("a_proj", "b_proj", "g_proj", "lambda_params"),
    )
    replicated = ("o_norm",)
    counts = ("num_heads",)
