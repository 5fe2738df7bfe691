"""The plan of BitNet, whose attention runs unsplit on every rank (Ma et al. 2024, arXiv:2402.17764)."""

from torch import nn

from titanplans import Plan, register_plan

from .transformer import TransformerPlan


@register_plan("bitnet", mixer="fla.layers.bitattn.BitAttention")
class BitNetPlan(TransformerPlan):
    """Attention runs unsplit: its rounding needs the mean of each full weight, and for `o_proj` the largest value of all
    heads."""

    head_names = ()

    def attn_plan(self, attn: nn.Module) -> Plan:
        return self.unsplit(attn)
