"""The plan of Gated DeltaNet, split by heads (Yang et al. 2024, arXiv:2412.06464)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("gated_deltanet", mixer="fla.layers.gated_deltanet.GatedDeltaNet")
class GatedDeltaNetPlan(MixerPlan):
    """Values are split by `num_v_heads`, queries and keys by `num_heads`, which may be fewer.

    The fused convolution concatenates queries, keys and values, and splits its output by `key_dim` and `value_dim`.
    """

    may_gather = True
    head_names = ("num_v_heads",)
    shared_head_names = ("num_heads",)
    by_head = ("v_proj", "v_conv1d", "a_proj", "b_proj", "g_proj", "A_log", "dt_bias")
    by_shared_head = ("q_proj", "k_proj", "q_conv1d", "k_conv1d")
    replicated = ("o_norm",)
    counts = ("num_v_heads", "value_dim")
    shared_counts = ("num_heads", "key_dim")
