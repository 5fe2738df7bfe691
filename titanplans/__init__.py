"""Model-parallel plans for language models: strict, complete, and proved equal to the unsharded model.

    from titanplans import TPPlan, register_plan       # a plan
    from titanplans import apply_plan, verify          # apply it, prove it
    from titanplans import parallelize                 # in torchtitan's trainer

The public names. Each is imported where it is first used: a command line that is wrong, or `--help`, needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanplans.errors import PlanError, UserError
    from titanplans.modeling.weights.adapters import load_adapter, save_adapter
    from titanplans.modeling.weights.full import (
        gather_full_optimizer_state_dict,
        gather_full_state_dict,
        load_full_optimizer_state_dict,
        load_full_state_dict,
    )
    from titanplans.modeling.weights.load import load_weights
    from titanplans.modeling.weights.save import save_weights
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
    from titanplans.proof import verify
    from titanplans.tensor_parallel import (
        Plan,
        TPOptions,
        TPPlan,
        apply_plan,
        check_plan,
        find_decoder,
        register_plan,
        registered_plans,
    )

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
    **dict.fromkeys(("PlanError", "UserError"), "errors"),
    **dict.fromkeys(
        (
            *(
                "DDPConfig",
                "Degrees",
                "FSDP2Config",
                "LoRA",
                "ParallelManager",
                "add_adapters",
                "parallelize",
            ),
            "process_group",
        ),
        "parallel",
    ),
    **dict.fromkeys(
        (
            *("gather_full_state_dict", "gather_full_optimizer_state_dict"),
            *("load_full_state_dict", "load_full_optimizer_state_dict"),
        ),
        "modeling.weights.full",
    ),
    **dict.fromkeys(("load_adapter", "save_adapter"), "modeling.weights.adapters"),
    "load_weights": "modeling.weights.load",
    "save_weights": "modeling.weights.save",
    "verify": "proof",
}
"""Where a public name lives, if not in `tensor_parallel`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'titanplans' has no attribute '{name}'")
    return getattr(import_module(f"titanplans.{_HOME.get(name, 'tensor_parallel')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
