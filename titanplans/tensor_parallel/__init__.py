"""WHAT a plan is and how it is applied: `TPPlan`, the registry, the styles, strict application.

The plans themselves are in `plans/`, one small file an architecture. Nothing here imports a model library or a
plan by name: it reads the names of modules and of their classes.
"""

from titanplans.errors import PlanError, UserError
from titanplans.tensor_parallel.apply import AppliedPlan, apply_plan, check_plan
from titanplans.tensor_parallel.decoder import Block, Decoder, find_decoder
from titanplans.tensor_parallel.plan import Plan, TPOptions, TPPlan
from titanplans.tensor_parallel.registry import register_plan, registered_plans

__all__ = [
    "AppliedPlan",
    "Block",
    "Decoder",
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
