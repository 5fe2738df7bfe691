"""The plans of RWKV-6 and RWKV-7, split by heads (Peng et al. 2024, arXiv:2404.05892; 2025, arXiv:2503.14456)."""

from torch import nn

from titanplans import Plan, register_plan

from .mixer import MixerPlan


@register_plan("rwkv7", mixer="fla.layers.rwkv7.RWKV7Attention")
class RWKV7Plan(MixerPlan):
    """The token shift mixes neighbouring tokens, so it runs inside regions, where each rank has the full sequence.

    The first layer's values, which all other layers use, stay split by heads.
    """

    by_head = (
        "r_proj",
        "k_proj",
        "v_proj",
        "w_lora.lora.2",
        "v_lora.lora.2",
        "a_lora.lora.2",
        "g_lora.lora.2",
    )
    by_head += ("k_k", "k_a", "r_k", "g_norm")
    replicated = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")
    replicated += ("w_lora.lora.0", "v_lora.lora.0", "a_lora.lora.0", "g_lora.lora.0")
    counts = ("g_norm.num_groups",)

    def attn_plan(self, attn: nn.Module) -> Plan:
        return super().attn_plan(attn) | self.attn_region(float8_input=False, may_gather=True)

    def mlp_plan(self, mlp: nn.Module) -> Plan:
        return {
            **self.attn_region("x", float8_input=False, may_gather=True),
            "x_k": self.replicated_in_region(),
            "key": self.colwise(),
            "value": self.rowwise(reduce_output=False),
        }


@register_plan("rwkv6", mixer="fla.layers.rwkv6.RWKV6Attention")
class RWKV6Plan(MixerPlan):
    """The MLP gates its output. Each rank has the full gate, so the gated partial sums add up to the gated output."""

    by_head = ("r_proj.linear", "w_proj.linear.lora.2", "k_proj.linear", "v_proj.linear", "g_proj.linear")
    by_head += ("bonus", "g_norm")
    replicated = ("x_proj.0", "x_proj.0.linear", "x_proj.2", "x_bias", "w_proj.linear.lora.0")
    counts = ("g_norm.num_groups",)

    def attn_plan(self, attn: nn.Module) -> Plan:
        return super().attn_plan(attn) | self.attn_region(float8_input=False, may_gather=True)

    def mlp_plan(self, mlp: nn.Module) -> Plan:
        return {
            **self.attn_region("x", float8_input=False, may_gather=True),
            "key": self.replicated_in_region(),
            "key.linear": self.colwise(),
            "value": self.rowwise(reduce_output=False),
            "receptance": self.replicated_in_region(),
            "receptance.linear": self.replicated_in_region(),
        }
