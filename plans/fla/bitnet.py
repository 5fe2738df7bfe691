"""The plan of BitNet, its attention whole on every rank (Ma et al. 2024, arXiv:2402.17764)."""

from torch import nn

from titanplans import Plan, register_plan

from .transformer import TransformerPlan


@register_plan("bitnet", mixer="fla.layers.bitattn.BitAttention")
class BitNetPlan(TransformerPlan):
    """Each of its projections is rounded by the mean of the whole weight, and `o_proj` by the greatest of all heads."""

    head_names = ()

    def attn_plan(self, attn: nn.Module) -> Plan:
        return self.whole(attn)
