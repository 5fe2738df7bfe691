"""The plans of Hunyuan: dense models, and a mixture with a shared MLP."""

from titanplans import register_plan

from .experts import ExpertsPlan
from .qwen import Qwen3Plan


@register_plan("hunyuan_v1_dense")
class HunYuanPlan(Qwen3Plan):
    """Queries and keys are normed head by head, after rotation."""

    head_norms = ("query_layernorm", "key_layernorm")


@register_plan("hunyuan_v1_moe")
class HunYuanMoePlan(ExpertsPlan, HunYuanPlan):
    """Every token also goes to `shared_mlp`."""

    shared_mlp = "shared_mlp"
