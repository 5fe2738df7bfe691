"""The plan of Gated Linear Attention, its heads split (Yang et al. 2023, arXiv:2312.06635)."""

from torch import nn

from titanplans import Plan, register_plan

from .transformer import TransformerPlan


@register_plan("gla", mixer="fla.layers.gla.GatedLinearAttention")
class GLAPlan(TransformerPlan):
    """A transformer's plan, but for the mixer.

    The forget gate is a low-rank product: `gk_proj.0` to 16 dimensions, the same on every rank, and
    `gk_proj.1` from there to the heads. The output norm has one weight for all heads.
    """

    def attn_plan(self, attn: nn.Module) -> Plan:
        has = attn._modules.keys()
        plan = {
            **self.attn_region(),
            "q_proj": self.colwise(),
            "k_proj": self.kv_colwise(attn),
            "v_proj": self.kv_colwise(attn),
            "gk_proj.0": self.replicated_in_region(),
            "gk_proj.1": self.kv_colwise(attn),
            "o_proj": self.rowwise(reduce_output=False),
        }
        plan |= {name: self.colwise() for name in ("g_proj", "q_conv1d") if name in has}
        plan |= {name: self.kv_colwise(attn) for name in ("k_conv1d", "v_conv1d") if name in has}
        plan |= {name: self.replicated_in_region() for name in ("g_norm", "g_norm_swish_gate") if name in has}
        return plan
