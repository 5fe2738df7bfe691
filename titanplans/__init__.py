"""Model-parallel plans for language models: strict, complete, and proved equal to the unsharded model.

    from titanplans import TPPlan, register_plan       # a plan
    from titanplans import apply_plan, verify          # apply it, prove it
    from titanplans import parallelize                 # in torchtitan's trainer

These are the public names. Each is imported when it is first used, so that `--help`, or a wrong command line, does not
import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanplans.apply.apply import apply_plan, check_plan
    from titanplans.errors import PlanError, UserError
    from titanplans.parallel import (
        DDPConfig,
        Degrees,
        FSDP2Config,
        LoRA,
        ParallelManager,
        add_adapters,
        parallelize,
        process_group,
    )
    from titanplans.plan.options import TPOptions
    from titanplans.plan.plan import Plan, TPPlan
    from titanplans.plan.registry import register_plan, registered_plans
    from titanplans.proof import verify
    from titanplans.split.decoder import find_decoder
    from titanplans.weights.adapters import load_adapter, save_adapter
    from titanplans.weights.full import (
        gather_full_optimizer_state_dict,
        gather_full_state_dict,
        load_full_optimizer_state_dict,
        load_full_state_dict,
    )
    from titanplans.weights.load import load_weights
    from titanplans.weights.save import save_weights

__all__ = [
    "DDPConfig",
    "Degrees",
    "FSDP2Config",
    "LoRA",
    "ParallelManager",
    "Plan",
    "PlanError",
    "TPOptions",
    "TPPlan",
    "UserError",
    "add_adapters",
    "apply_plan",
    "check_plan",
    "find_decoder",
    "gather_full_optimizer_state_dict",
    "gather_full_state_dict",
    "load_adapter",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_weights",
    "parallelize",
    "process_group",
    "register_plan",
    "registered_plans",
    "save_adapter",
    "save_weights",
    "verify",
]

_HOME = {
    "PlanError": "errors",
    "UserError": "errors",
    "Plan": "plan.plan",
    "TPOptions": "plan.plan",
    "TPPlan": "plan.plan",
    "apply_plan": "apply.apply",
    "check_plan": "apply.apply",
    "find_decoder": "split.decoder",
    "register_plan": "plan.registry",
    "registered_plans": "plan.registry",
    "gather_full_optimizer_state_dict": "weights.full",
    "gather_full_state_dict": "weights.full",
    "load_full_optimizer_state_dict": "weights.full",
    "load_full_state_dict": "weights.full",
    "load_adapter": "weights.adapters",
    "save_adapter": "weights.adapters",
    "load_weights": "weights.load",
    "save_weights": "weights.save",
    "verify": "proof",
}
"""Where a public name lives, if not in `parallel`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'titanplans' has no attribute '{name}'")
    return getattr(import_module(f"titanplans.{_HOME.get(name, 'parallel')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
