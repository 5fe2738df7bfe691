"""The plan of the Wall transformer, split by heads: softmax attention whose channels decay."""

from titanplans import register_plan

from .forgetting_transformer import ForgettingTransformerPlan


@register_plan("wall_transformer", mixer="fla.layers.wall_attn.WallAttention")
class WallTransformerPlan(ForgettingTransformerPlan):
    """Each channel of a query head has its own decay (`g_proj`); with `gs_proj`, each head has one more decay."""

    by_head = ("q_proj", "q_norm", "g_proj", "gs_proj", "o_gate_proj")
