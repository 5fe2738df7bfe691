"""The plan of linear attention, split by heads (Katharopoulos et al. 2020, arXiv:2006.16236)."""

from titanplans import register_plan

from .mixer import MixerPlan


@register_plan("linear_attn", mixer="fla.layers.linear_attn.LinearAttention")
class LinearAttentionPlan(MixerPlan):
    """Feature maps act on each head; all heads share the weights of the feature maps."""

    may_gather = True
    by_head = ("q_proj",)
    by_shared_head = ("k_proj", "v_proj")
    replicated = (
        "norm",
        *(f"feature_map_{x}.{layer}" for x in "qk" for layer in ("layer", "layer1", "layer2")),
    )
