"""Check that the local attributes and functions of a plan exist in the code of the split modules."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.resolve import ResolvedPlan
from titanplans.split.decoder import join
from titanplans.split.local_code import Functions, calls, methods
from titanplans.text import class_name
from titanplans.user_code import as_user_error


def code_of_ranks(plan: ResolvedPlan) -> tuple[dict[str, dict[str, Any]], dict[str, Functions]]:
    """Return the local attributes and the makers of local functions, by the name of the split module.

    The plan's methods are called with the degree tp x cp for mixers and the model, and with the degree tp for MLPs.

    Raises:
        PlanError: a module has no such attribute, or its code calls no such function.
    """
    model, decoder, degrees = plan.model, plan.decoder, plan.source.options.degrees
    source = plan.source.counting_for(degrees.tp_cp)
    attributes: dict[str, dict[str, Any]] = {}
    functions: dict[str, Functions] = {}
    with as_user_error(f"plan {type(source).__name__}"):
        for key, make in source.model_functions(model).items():
            path, _, name = key.rpartition(".")
            functions[path] = {**functions.get(path, {}), name: make}
        attributes[""] = source.model_attributes(model)
    for name, mixer in decoder.mixers.items():
        if plan.split_key(name) is not None:
            owner = source.plan_of(mixer).counting_for(degrees.tp_cp)
            with as_user_error(f"plan {type(owner).__name__}"):
                attributes[name] = {**owner.queries_per_group(mixer), **owner.local_attributes(mixer)}
                functions[name] = owner.local_functions(mixer)
    for name, mlp in decoder.mlps.items():
        if plan.split_key(name) is not None:
            with as_user_error(f"plan {type(source).__name__}"):
                attributes[name] = source.counting_for(degrees.tp).mlp_attributes(mlp)
    hooks = {"": "model_attributes", **dict.fromkeys(decoder.mlps, "mlp_attributes")}
    for name in attributes:
        _check(
            model,
            name,
            _misnamed(model.get_submodule(name), attributes[name]),
            hooks.get(name, "local_attributes"),
        )
    for name in functions:
        hook, prefix = ("local_functions", "") if name in decoder.mixers else ("model_functions", name)
        if name not in dict(model.named_modules(remove_duplicate=False)):
            _check(
                model,
                "",
                (join(prefix, next(iter(functions[name]))), f"the model has no module '{name}'"),
                hook,
            )
        _check(model, name, _uncalled(model.get_submodule(name), functions[name], prefix), hook)
    return attributes, functions


def _check(model: nn.Module, name: str, fault: tuple[str, str] | None, hook: str) -> None:
    """Raise a PlanError if there is a `fault`: a wrong name, returned by the plan's method `hook`, and why it is wrong."""
    if fault is not None:
        attribute, reason = fault
        module = f"{name or 'the model'} ({type(model.get_submodule(name)).__name__})"
        raise PlanError(f"{module}: its plan's {hook} has '{attribute}', but {reason}")


def _misnamed(module: nn.Module, attributes: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first attribute that `module` lacks, and what is wrong with its name; None if it has all."""
    for name in attributes:
        holder, path = module, name.split(".")
        for step in path:
            if not hasattr(holder, step):
                return (
                    name,
                    f"{type(holder).__name__} has no '{step}': use the names in the module's code",
                )
            holder = getattr(holder, step)
    return None


def _uncalled(module: nn.Module, functions: Functions, path: str) -> tuple[str, str] | None:
    """Return the first function, with `path` before its name, that the code of `module` does not call, and the reason."""
    for name in functions:
        if not any(calls(method, name) for method in methods(type(module)).values()):
            kind = class_name(module)
            return (
                join(path, name),
                f"no method of {kind} calls a function of this name that its file imports or defines",
            )
    return None
