"""The plans of LFM2: short convolutions and attention in one stack, with or without experts."""

from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .experts import ExpertsPlan
from .qwen import Qwen3Plan


@register_plan("lfm2")
class Lfm2Plan(Qwen3Plan):
    """The convolution is split by channels, with the two gates that multiply its input and its output."""

    head_norms = ("q_layernorm", "k_layernorm")
    attn_out = "out_proj"
    mlp_in = ("w1", "w3")
    mlp_out = "w2"

    def model_plan(self, model: nn.Module) -> Plan:
        return super().model_plan(model) | {"model.embedding_norm": self.replicated_on_stream()}

    def heads(self, attn: Any) -> dict[str, int]:
        return {"in_channels": attn.conv.in_channels} if hasattr(attn, "conv") else super().heads(attn)

    def attn_plan(self, attn: Any) -> Plan:
        if not hasattr(attn, "conv"):
            return super().attn_plan(attn)
        width = attn.conv.in_channels
        return {
            **self.attn_input(may_gather=True),  # the mixer's code sets padding to zero
            "in_proj": self.packed(width, width, width),
            "conv": self.colwise(),
            "out_proj": self.rowwise(),
        }


@register_plan("lfm3")
class Lfm3Plan(Lfm2Plan):
    """Attention has a gate for each of its outputs."""

    head_norms = ("q_norm", "k_norm")
    attn_out = "o_proj"

    def attn_plan(self, attn: Any) -> Plan:
        gate = {} if hasattr(attn, "conv") else {"g_proj": self.colwise()}
        return super().attn_plan(attn) | gate


@register_plan("lfm2_moe")
class Lfm2MoePlan(ExpertsPlan, Lfm2Plan):
    """Mixtures have no shared experts."""
