"""The plan of Rodimus, which has one head, split by channels (He et al. 2024, arXiv:2410.06577)."""

from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .mamba2 import gated_input
from .mixer import MixerPlan, has
from .transformer import TransformerPlan


@register_plan("rodimus", mixer="fla.layers.rodimus.RodimusAttention")
class RodimusPlan(TransformerPlan):
    """Each channel has its own state. Queries, keys and gates (64 wide) depend on all channels, so partials are summed.

    Rodimus+ has attention with one shared key head after each mixer.
    """

    head_names = ("d_inner",)

    def layer_plan(self, layer: Any) -> Plan:
        shared_key = self.plan_of(layer.ska_attn).attn_plan(layer.ska_attn) if has(layer, "ska_attn") else {}
        return super().layer_plan(layer) | {f"ska_attn.{k}".rstrip("."): s for k, s in shared_key.items()}

    def attn_plan(self, attn: Any) -> Plan:
        by_channel = ("gate_proj", "up_proj", "short_conv", "residual_weight", "i_gate_proj.1")
        uncalled = ("g_gate_proj", "tau_gate_proj")  # the mixer's own code multiplies by their weights
        return {
            **self.attn_region(may_gather=True),
            **{name: self.colwise() for name in by_channel if has(attn, name)},
            **{name: self.rowwise_in_region() for name in ("q_proj", "k_proj", "i_gate_proj.0")},
            **{f"{name}.weight": self.rowwise_in_region() for name in uncalled},
            **{f"{name}.bias": self.replicated_in_region() for name in uncalled},
            "activation_norm": self.split_norm(statistic=gated_input),
            "down_proj": self.rowwise(reduce_output=False),
        }

    def local_functions(self, attn: Any):
        return {"F.linear": self.sum_over_ranks}

    def model_attributes(self, model: nn.Module) -> dict[str, int]:
        attentions = (name for name, _ in model.named_modules() if name.endswith(".ska_attn"))
        return self.divide_by_degree(model, *(f"{name}.num_heads" for name in attentions))


@register_plan(mixer="fla.layers.rodimus.SlidingWindowSharedKeyAttention")
class SharedKeyPlan(MixerPlan):
    """Queries and values have heads; all heads share one key head."""

    may_gather = True
    by_head = ("q_proj", "v_proj")
    replicated = ("k_proj", "q_norm", "k_norm")
    counts = ("num_heads",)
