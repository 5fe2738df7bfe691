"""The plan of the Wall transformer, split by heads: softmax attention whose channels decay."""

from titanplans import register_plan

from .forgetting_transformer import ForgettingTransformerPlan


@register_plan("wall_transformer", mixer="fla.layers.wall_attn.WallAttention")
class WallTransformerPlan(ForgettingTransformerPlan):
    """Each channel of a query head decays at its own rate (`g_proj`), and with `gs_proj` each head decays, too."""

    by_head = ("q_proj", "q_norm", "g_proj", "gs_proj", "o_gate_proj")
