"""WHAT is split: one `TPPlan` class per architecture, the registry, the styles, strict application.

Nothing here imports a model library: plans read the names of modules and of their classes.

    from plans import TPPlan, apply_plan, register_plan
"""

from plans.apply import apply_plan, check_plan
from plans.errors import PlanError, UserError
from plans.gemma3 import Gemma3Plan, Gemma3VisionPlan
from plans.gla import GLAPlan
from plans.llama import LlamaPlan
from plans.plan import TPOptions, TPPlan
from plans.qwen import Qwen2Plan, Qwen3Plan
from plans.registry import register_plan, registered_plans
from plans.transformer import TransformerPlan

__all__ = [
    "GLAPlan",
    "Gemma3Plan",
    "Gemma3VisionPlan",
    "LlamaPlan",
    "PlanError",
    "Qwen2Plan",
    "Qwen3Plan",
    "TPOptions",
    "TPPlan",
    "TransformerPlan",
    "UserError",
    "apply_plan",
    "check_plan",
    "register_plan",
    "registered_plans",
]
