"""WHAT a plan is and how it is applied: `TPPlan`, the registry, the styles, strict application.

The plans themselves stand in `plans/`, one small file an architecture. Nothing here imports a model library or a
plan by name: it reads the names of modules and of their classes.
"""

from titanplans.errors import PlanError, UserError
from titanplans.tensor_parallel.apply import apply_plan, check_plan
from titanplans.tensor_parallel.plan import Plan, TPOptions, TPPlan
from titanplans.tensor_parallel.registry import register_plan, registered_plans
from titanplans.tensor_parallel.structure import find_decoder

__all__ = [
    "Plan",
    "PlanError",
    "TPOptions",
    "TPPlan",
    "UserError",
    "apply_plan",
    "check_plan",
    "find_decoder",
    "register_plan",
    "registered_plans",
]
