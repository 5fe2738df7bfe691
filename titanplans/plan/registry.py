"""Which plan belongs to which architecture, and to which token mixer.

An architecture is known by its `config.model_type`, or where it has none by its class; a mixer by its class's qualified
name, because hybrid models put softmax and linear layers into one stack. No model library is imported to look them up.
Plans are found at the first look-up: every module below `titanplans.plans`, and the entry points of the group of that name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from titanplans.config.families import PLANS
from titanplans.errors import PlanError, UserError
from titanplans.plan.plan_styles import PlanStyles
from titanplans.user_code import as_user_error

if TYPE_CHECKING:
    from titanplans.plan.plan import TPPlan

P = TypeVar("P", bound="type[TPPlan]")

_BY_MODEL_TYPE: dict[str, type[TPPlan]] = {}
_BY_MIXER: dict[str, type[TPPlan]] = {}


def register_plan(*model_types: str, mixer: str | None = None) -> Callable[[P], P]:
    """Register a TPPlan class for one or more `config.model_type`s, as a class decorator.

    Args:
        model_types: the `config.model_type`s whose models this plan splits.
        mixer: qualified name of the token-mixer class that this plan's `attn_plan` splits, such as
            "fla.layers.gla.GatedLinearAttention". A block of another architecture that holds such
            a mixer uses this plan's `attn_plan` for it.

    Raises:
        PlanError: a name is taken or is no string; no name is given; the decorated object is no TPPlan class.
    """
    if not (model_types or mixer) or not all(isinstance(name, str) for name in (*model_types, mixer or "")):
        given = ", ".join(map(repr, model_types))
        raise PlanError(
            f"register_plan({given}): give the names that it is for, as in @register_plan('my_arch')"
        )

    def decorate(plan: P) -> P:
        if not (
            isinstance(plan, type) and issubclass(plan, PlanStyles)
        ):  # the base of TPPlan, which looks mixers up here
            names = ", ".join(map(repr, model_types or [mixer]))
            raise PlanError(f"register_plan({names}): {plan!r} is no subclass of titanplans.TPPlan")
        for table, names in ((_BY_MODEL_TYPE, model_types), (_BY_MIXER, (mixer,) if mixer else ())):
            for name in names:
                holder = table.get(name)
                if holder is not None and _qualified(holder) != _qualified(plan):
                    raise PlanError(
                        f"register_plan('{name}'): taken by {_qualified(holder)}; subclass it and pass the "
                        f"subclass as `plan`, or register {_qualified(plan)} under another name"
                    )
                table[name] = plan
        return plan

    return decorate


@cache
def _discover() -> tuple[str, ...]:
    """Import every module that registers plans: those below `titanplans.plans`, and other packages' entry points.

    Returns:
        Why entry points can't be loaded, one sentence each: another package's fault breaks no plan but its own.
    """
    package = import_module(PLANS)
    for module in pkgutil.walk_packages(package.__path__, f"{PLANS}."):
        import_module(module.name)
    faults = []
    for entry in metadata.entry_points(group=PLANS):
        try:
            with as_user_error(f"entry point {entry.name} = '{entry.value}' of the group {PLANS}"):
                entry.load()
        except UserError as fault:
            faults.append(str(fault))
    return tuple(faults)


def faulty_plans() -> tuple[str, ...]:
    """Return a sentence for each entry point whose plans can't be loaded; they are not registered."""
    return _discover()


def registered_plans() -> dict[str, type[TPPlan]]:
    """Return the registered plans by `config.model_type`, sorted."""
    _discover()
    return dict(sorted(_BY_MODEL_TYPE.items()))


def registered_mixers() -> dict[str, type[TPPlan]]:
    """Return the registered plans by qualified name of the token mixer that they split, sorted."""
    _discover()
    return dict(sorted(_BY_MIXER.items()))


def model_type_of(model: nn.Module) -> str:
    """Return by which name a plan of `model` is registered: its config's `model_type`, its own, or its class's name."""
    of_config = getattr(getattr(model, "config", None), "model_type", None)
    return of_config or getattr(model, "model_type", None) or type(model).__name__


def plan_for_model(model: nn.Module) -> type[TPPlan]:
    """Return the plan class registered for `model_type_of(model)`.

    Raises:
        PlanError: none is.
    """
    _discover()
    model_type = model_type_of(model)
    plan = _BY_MODEL_TYPE.get(model_type)
    if plan is None:
        raise PlanError(
            f"no plan is registered for {type(model).__name__} (model_type = {model_type!r}); registered: "
            f"{', '.join(sorted(_BY_MODEL_TYPE))}. Register one with @register_plan({model_type!r}), or name one: "
            "[model] plan = 'module:Class'; a model's own tp_plan is not read, and none is derived"
            f"{''.join(f'. Not loaded: {fault}' for fault in faulty_plans())}"
        )
    return plan


def plan_for_mixer(mixer: nn.Module) -> type[TPPlan] | None:
    """Return the plan class registered for the class of `mixer`, or None."""
    _discover()
    for cls in type(mixer).__mro__:
        if (plan := _BY_MIXER.get(_qualified(cls))) is not None:
            return plan
    return None


def mixer_plan_of(plan: type[TPPlan]) -> type[TPPlan] | None:
    """Return the nearest ancestor of `plan` (or itself) that a mixer class is registered for."""
    return next((cls for cls in plan.__mro__ if cls in _BY_MIXER.values()), None)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
