"""The plans of mixtures of experts whose attention is Llama's or Qwen's: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from titanplans import register_plan

from .experts import ExpertsPlan
from .qwen import Qwen3Plan


@register_plan("mixtral")
class MixtralPlan(ExpertsPlan):
    """Attention as in Mistral."""


@register_plan("qwen2_moe")
class Qwen2MoePlan(ExpertsPlan):
    """A shared expert beside the routed ones, behind a gate of its own."""

    shared = "shared_expert"
    in_region = ("shared_expert_gate",)


@register_plan("qwen3_moe")
class Qwen3MoePlan(ExpertsPlan, Qwen3Plan):
    """Attention as in Qwen3."""
