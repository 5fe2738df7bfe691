"""The plans of mixtures of experts with the attention of a dense decoder, such as Mixtral, Qwen3-MoE, OLMoE and GLM-4.5."""

from typing import Any

from titanplans import Plan, register_plan

from .experts import ExpertsPlan
from .olmo import Olmo2Plan
from .qwen import Qwen3Plan


@register_plan("mixtral", "cohere2_moe")
class MixtralPlan(ExpertsPlan):
    """Attention as in Mistral."""


@register_plan("qwen2_moe")
class Qwen2MoePlan(ExpertsPlan):
    """A shared expert in addition to the routed ones, with its own gate."""

    shared_mlp = "shared_expert"
    in_region = ("shared_expert_gate",)


@register_plan("qwen3_moe", "mellum")
class Qwen3MoePlan(ExpertsPlan, Qwen3Plan):
    """Attention as in Qwen3."""


@register_plan("olmoe", "flex_olmo", "minimax_m2")
class OlmoePlan(ExpertsPlan, Olmo2Plan):
    """Attention as in OLMo 2."""


@register_plan("glm4_moe", "sarvam_moe")
class Glm4MoePlan(ExpertsPlan, Qwen3Plan):
    """Shared experts, and a router like DeepSeek-V3's; queries and keys may be normed head by head."""

    shared_mlp = "shared_experts"

    def attn_plan(self, attn: Any) -> Plan:
        plan = super().attn_plan(attn)
        return {name: style for name, style in plan.items() if attn.use_qk_norm or "norm" not in name}


@register_plan("dots1", "exaone_moe", "hy_v3", "kolibri1")
class Dots1Plan(ExpertsPlan, Qwen3Plan):
    """Shared experts, and attention as in Qwen3."""

    shared_mlp = "shared_experts"


@register_plan("solar_open", "ernie4_5_moe")
class SolarOpenPlan(ExpertsPlan):
    """Shared experts, and attention as in Llama."""

    shared_mlp = "shared_experts"


@register_plan("afmoe")
class AfmoePlan(Dots1Plan):
    """Attention has a gate for each of its outputs. The experts' bias is a parameter without a gradient."""

    router = "router"
    in_region = ("expert_bias",)

    def attn_plan(self, attn: Any) -> Plan:
        return super().attn_plan(attn) | {"gate_proj": self.colwise()}
