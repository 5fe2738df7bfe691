"""The plans of models with an attention sink for each head: gpt-oss, MiMo-V2-Flash, and Granite with windows."""

from typing import Any

from torch import nn

from titanplans import Plan, register_plan

from .experts import ExpertsPlan
from .granite import GraniteMoePlan
from .llama import LlamaPlan
from .mixtral import Qwen3MoePlan


@register_plan("granite_swa")
class SinksPlan(LlamaPlan):
    """Sinks are split with their heads. Not every block has them in some models."""

    def attn_plan(self, attn: Any) -> Plan:
        sinks = {} if getattr(attn, "sinks", None) is None else {"sinks": self.colwise()}
        return super().attn_plan(attn) | sinks


@register_plan("granitemoe_swa")
class GraniteMoeSinksPlan(GraniteMoePlan, SinksPlan):
    """Granite's mixture, and a sink for each head."""


@register_plan("flint")
class FlintPlan(Qwen3MoePlan, SinksPlan):
    """Mixtures as in Qwen3-MoE with a shared expert, and a sink for each head."""

    shared_mlp = "shared_expert"


@register_plan("mimo_v2_flash")
class MiMoV2FlashPlan(ExpertsPlan, SinksPlan):
    """Values are narrower than keys. Blocks with a window have sinks, and twice the key/value heads of the config."""

    def heads(self, attn: Any) -> dict[str, int]:
        queries = attn.config.num_attention_heads
        return {"num_attention_heads": queries, "num_key_value_heads": queries // attn.num_key_value_groups}


@register_plan("gpt_oss")
class GptOssPlan(ExpertsPlan, SinksPlan):
    """Experts have biases, and rows of gate and up are interleaved."""

    router = "router"

    def mlp_attributes(self, mlp: nn.Module) -> dict[str, int]:
        return {} if self.options.degrees.ep > 1 else self.divide_by_degree(mlp, "experts.intermediate_size")
