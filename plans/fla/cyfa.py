"""The plan of cyclic flow attention, split by heads (arXiv:2609.36259)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("cyclic_flow_attention", mixer="fla.layers.cyfa.CyclicFlowAttention")
class CyclicFlowAttentionPlan(MixerPlan):
    """FLA joins the weights of queries, keys and values, and splits the output by `key_dim` and `value_dim`."""

    may_gather = True
    by_head = (
        *("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "g_proj.1"),
        *("a_proj", "b_proj", "d_proj", "A_log", "dt_bias", "readout"),
    )
    replicated = ("q_norm", "k_norm", "g_proj.0", "o_norm")
    counts = ("key_dim", "value_dim")
