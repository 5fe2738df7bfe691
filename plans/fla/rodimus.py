"""The plan of Rodimus, the channels of its one head split (He et al. 2024, arXiv:2410.06577)."""

from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .mamba2 import gated_before
from .mixer import has
from .transformer import TransformerPlan


@register_plan("rodimus", mixer="fla.layers.rodimus.RodimusAttention")
class RodimusPlan(TransformerPlan):
    """Each channel has a state of its own; queries, keys and gates, 64 wide, are made of all of them and are sums.

    Rodimus+ has attention with one shared key head behind each mixer.
    """

    head_names = ("d_inner",)

    def layer_plan(self, layer: Any) -> Plan:
        plan = super().layer_plan(layer)
        if not has(layer, "ska_attn"):
            return plan
        names = ("k_proj", "q_norm", "k_norm")
        attn = {
            **self.attn_region(),
            "q_proj": self.colwise(),
            "v_proj": self.colwise(),
            **{name: self.replicated_in_region() for name in names if has(layer.ska_attn, name)},
            "o_proj": self.rowwise(reduce_output=False),
        }
        return plan | {f"ska_attn.{name}".rstrip("."): style for name, style in attn.items()}

    def attn_plan(self, attn: Any) -> Plan:
        plan = {
            **self.attn_region(),
            **{name: self.colwise() for name in ("gate_proj", "up_proj", "residual_weight", "i_gate_proj.1")},
            **{name: self.rowwise_in_region() for name in ("q_proj", "k_proj", "i_gate_proj.0")},
            "activation_norm": self.split_norm(statistic=gated_before),
            "down_proj": self.rowwise(reduce_output=False),
        }
        for gate in ("g_gate_proj", "tau_gate_proj"):  # the mixer multiplies by their weights itself
            plan |= {f"{gate}.weight": self.colwise(dim=1), f"{gate}.bias": self.replicated_in_region()}
        return plan | ({"short_conv": self.colwise()} if attn.use_short_conv else {})

    def local_attributes(self, attn: Any) -> dict[str, int]:
        return {}

    def local_functions(self, attn: Any):
        return {"F.linear": self.summed}

    def model_attributes(self, model: nn.Module) -> dict[str, int]:
        attentions = (name for name, _ in model.named_modules() if name.endswith(".ska_attn"))
        return self.divided(model, *(f"{name}.num_heads" for name in attentions))
