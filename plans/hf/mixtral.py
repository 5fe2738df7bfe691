"""The plans of mixtures of experts with the attention of a dense decoder: Mixtral, Qwen2- and 3-MoE, OLMoE, GLM-4.5."""

from typing import Any

from titanplans import Plan, register_plan

from .experts import ExpertsPlan
from .olmo import Olmo2Plan
from .qwen import Qwen3Plan


@register_plan("mixtral")
class MixtralPlan(ExpertsPlan):
    """Attention as in Mistral."""


@register_plan("qwen2_moe")
class Qwen2MoePlan(ExpertsPlan):
    """A shared expert in addition to the routed ones, with its own gate."""

    shared_mlp = "shared_expert"
    in_region = ("shared_expert_gate",)


@register_plan("qwen3_moe")
class Qwen3MoePlan(ExpertsPlan, Qwen3Plan):
    """Attention as in Qwen3."""


@register_plan("olmoe")
class OlmoePlan(ExpertsPlan, Olmo2Plan):
    """Attention as in OLMo 2."""


@register_plan("glm4_moe")
class Glm4MoePlan(ExpertsPlan, Qwen3Plan):
    """Shared experts, and a router like DeepSeek-V3's; queries and keys may be normed head by head."""

    shared_mlp = "shared_experts"
    balance = None

    def attn_plan(self, attn: Any) -> Plan:
        plan = super().attn_plan(attn)
        return {name: style for name, style in plan.items() if attn.use_qk_norm or "norm" not in name}
