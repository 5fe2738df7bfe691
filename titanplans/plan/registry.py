"""The registry: which plan belongs to an architecture, and to a token mixer.

Plans are discovered at the first look-up: in every Python module below `titanplans.plans`, and in the entry points of the
group "titanplans.plans". No model library is imported.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from titanplans.config.families import PLANS
from titanplans.errors import PlanError, UserError, nearest
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
        mixer: the qualified name of the token-mixer class that this plan's `attn_plan` splits, such as
            "fla.layers.gla.GatedLinearAttention". A block of another architecture that holds such a mixer uses this
            plan's `attn_plan` for it. This is a class name and not a `model_type`, because hybrid models have several mixers
            in one stack.

    Raises:
        PlanError: a name is taken or is not a string; no name is given; the decorated object is not a TPPlan class.
    """
    if not (model_types or mixer) or not all(isinstance(name, str) for name in (*model_types, mixer or "")):
        arguments = ", ".join(map(repr, model_types))
        raise PlanError(
            f"register_plan({arguments}): pass the model types that the plan is for, as in @register_plan('my_arch')"
        )

    def decorate(plan: P) -> P:
        # PlanStyles is the base of TPPlan, whose module imports this one.
        if not (isinstance(plan, type) and issubclass(plan, PlanStyles)):
            names = ", ".join(map(repr, model_types or [mixer]))
            raise PlanError(f"register_plan({names}): {plan!r} is not a subclass of titanplans.TPPlan")
        for table, names in ((_BY_MODEL_TYPE, model_types), (_BY_MIXER, (mixer,) if mixer else ())):
            for name in names:
                owner = table.get(name)
                if owner is not None and _qualified(owner) != _qualified(plan):
                    raise PlanError(
                        f"register_plan('{name}'): taken by {_qualified(owner)}; subclass it and pass the "
                        f"subclass as `plan`, or register {_qualified(plan)} under another name"
                    )
                table[name] = plan
        return plan

    return decorate


@cache
def _discover() -> tuple[str, ...]:
    """Import every Python module that registers plans: those below `titanplans.plans`, and other packages' entry points.

    Returns:
        One sentence for each entry point that can't be loaded: a fault in another package breaks only its own plans.
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
    """Return one sentence for each entry point that can't be loaded; its plans are not registered."""
    return _discover()


def registered_plans() -> dict[str, type[TPPlan]]:
    """Return the registered plans by `config.model_type`, sorted."""
    _discover()
    return dict(sorted(_BY_MODEL_TYPE.items()))


def registered_mixers() -> dict[str, type[TPPlan]]:
    """Return the registered plans by the qualified name of the token mixer that they split, sorted."""
    _discover()
    return dict(sorted(_BY_MIXER.items()))


def model_type_of(model: nn.Module) -> str:
    """Return the name for which a plan of `model` is registered.

    This is the `model_type` of the model's config, or else of the model itself, or else the name of its class.
    """
    of_config = getattr(getattr(model, "config", None), "model_type", None)
    return of_config or getattr(model, "model_type", None) or type(model).__name__


def plan_for_model(model: nn.Module) -> type[TPPlan]:
    """Return the plan class registered for `model_type_of(model)`.

    Raises:
        PlanError: there is none.
    """
    _discover()
    model_type = model_type_of(model)
    plan = _BY_MODEL_TYPE.get(model_type)
    if plan is None:
        near = nearest(str(model_type), _BY_MODEL_TYPE)
        raise PlanError(
            f"no plan is registered for {type(model).__name__} (model_type = {model_type!r}); registered: "
            f"{', '.join(sorted(_BY_MODEL_TYPE))}. {f'Did you mean {near}? ' if near else ''}Name one: [model] plan = "
            f"'module:Class'; or register one: @register_plan({model_type!r}); or let one be derived and proved: [model] "
            "derive = true, or titanplans derive MODEL --output plan.py. A model's own tp_plan is not used"
            f"{''.join(f'. Not loaded: {fault}' for fault in faulty_plans())}"
        )
    return plan


def file_of(plan: type[TPPlan]) -> str:
    """Return the file of a plan's class, such as "plans/fla/gla.py"; another package's file begins with the package."""
    return f"{plan.__module__.removeprefix('titanplans.').replace('.', '/')}.py"


def plan_for_mixer(mixer: nn.Module) -> type[TPPlan] | None:
    """Return the plan class registered for the class of `mixer`, or None."""
    _discover()
    for cls in type(mixer).__mro__:
        if (plan := _BY_MIXER.get(_qualified(cls))) is not None:
            return plan
    return None


def mixer_plan_of(plan: type[TPPlan]) -> type[TPPlan] | None:
    """Return `plan`, or its nearest ancestor, that is registered for a mixer class; None if none is."""
    return next((cls for cls in plan.__mro__ if cls in _BY_MIXER.values()), None)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
