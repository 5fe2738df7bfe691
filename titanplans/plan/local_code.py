"""What a plan declares of a split module's own code: numbers that count heads, and functions that depend on the rank.

A plan declares both (`TPPlan.local_attributes`, `TPPlan.local_functions`); nothing is guessed. They are checked here against
the module's code, and put in by `titanplans.split.local_code`.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.decoder import join
from titanplans.text import class_name
from titanplans.user_code import as_user_error

if TYPE_CHECKING:
    from titanplans.plan.resolve import ResolvedPlan


class Place(Protocol):
    """Where a rank stands among those that share the heads, and sums over them."""

    @property
    def rank(self) -> int: ...

    @property
    def degree(self) -> int: ...

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' parts; the region goes on with the sum on every rank."""
        ...

    def root_ratio(self, x: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the ratio [..., 1] of the root mean square of this rank's `x` [..., width] to that of all ranks'."""
        ...


Functions = Mapping[str, Callable[[Callable[..., Any], Place], Callable[..., Any]]]
"""By the name under which a module's code calls a function: the maker of this rank's function from it.

"F.linear" is a function of the file `F`; "retention.decay" one that the function `retention` calls.
"""


def code_of_ranks(plan: "ResolvedPlan") -> tuple[dict[str, dict[str, Any]], dict[str, Functions]]:
    """Return the attributes and the functions of a rank's own code, by the name of the split module.

    Raises:
        PlanError: a module has no such attribute, or its code calls no such function.
    """
    source, model, decoder = plan.source, plan.model, plan.decoder
    attributes: dict[str, dict[str, Any]] = {}
    functions: dict[str, Functions] = {}
    with as_user_error(f"plan {type(source).__name__}"):
        for key, make in source.model_functions(model).items():
            path, _, name = key.rpartition(".")
            functions[path] = {**functions.get(path, {}), name: make}
        attributes[""] = source.model_attributes(model)
    for name, mixer in decoder.mixers.items():
        if plan.split_key(name) is not None:
            owner = source.plan_of(mixer)
            with as_user_error(f"plan {type(owner).__name__}"):
                attributes[name] = {**owner.queries_per_group(mixer), **owner.local_attributes(mixer)}
                functions[name] = owner.local_functions(mixer)
    for name, mlp in decoder.mlps.items():
        if plan.split_key(name) is not None:
            with as_user_error(f"plan {type(source).__name__}"):
                attributes[name] = source.mlp_attributes(mlp)
    hooks = {"": "model_attributes", **dict.fromkeys(decoder.mlps, "mlp_attributes")}
    for name in attributes:
        _check(
            model,
            name,
            _misnamed(model.get_submodule(name), attributes[name]),
            hooks.get(name, "local_attributes"),
        )
    for name in functions:
        hook, given = ("local_functions", "") if name in decoder.mixers else ("model_functions", name)
        if name not in dict(model.named_modules()):
            _check(
                model,
                "",
                (join(given, next(iter(functions[name]))), f"the model has no module '{name}'"),
                hook,
            )
        _check(model, name, _uncalled(model.get_submodule(name), functions[name], given), hook)
    return attributes, functions


def _check(model: nn.Module, name: str, fault: tuple[str, str] | None, hook: str) -> None:
    """Raise a PlanError of `fault`: the name that the `hook` of a plan gives for the module `name`, and the reason."""
    if fault is not None:
        given, reason = fault
        module = f"{name or 'the model'} ({type(model.get_submodule(name)).__name__})"
        raise PlanError(f"{module}: its plan's {hook} name '{given}', but {reason}")


def _misnamed(module: nn.Module, attributes: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the attribute that can't be set on `module`, and why; or None."""
    for name in attributes:
        holder, path = module, name.split(".")
        for step in path:
            if not hasattr(holder, step):
                return (
                    name,
                    f"{type(holder).__name__} has no '{step}': give the names that the module's code reads",
                )
            holder = getattr(holder, step)
    return None


def _uncalled(module: nn.Module, functions: Functions, path: str) -> tuple[str, str] | None:
    """Return the function that can't be replaced in the code of `module`, which keys name by `path`, and why; or None."""
    for name in functions:
        if not any(calls(method, name) for method in methods(type(module)).values()):
            kind = class_name(module)
            return (
                join(path, name),
                f"no method of {kind} calls a function of this name that its file imports or defines",
            )
    return None


def methods(cls: type) -> dict[str, FunctionType]:
    """Return the methods of `cls` by name."""
    found = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    return {name: member for name, member in found.items() if isinstance(member, FunctionType)}


def calls(function: FunctionType, name: str) -> bool:
    """Whether the code of `function`, or of the function that it decorates, looks `name` up in its file."""
    if looks_up(function, name):
        return True
    inner = getattr(function, "__wrapped__", None)
    return isinstance(inner, FunctionType) and calls(inner, name)


def looks_up(function: FunctionType, name: str) -> bool:
    """Whether the code of `function` itself looks `name` up in its file."""
    first, *path = name.split(".")
    if first not in function.__code__.co_names or first not in function.__globals__:
        return False
    if path and isinstance(called := function.__globals__[first], FunctionType):
        return calls(called, ".".join(path))
    return set(path) <= set(function.__code__.co_names)


def count_once(function: Callable[..., Any], place: Place) -> Callable[..., Any]:
    """Return `function` of tensors that every rank has whole: its gradient is divided by the ranks, which sum theirs.

    For a loss besides that of the logits, such as the balance of a router inside a region.
    """

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        value = value.view_as(value)
        value.register_hook(lambda grad: grad / place.degree)
        return value

    return computed


def summed(function: Callable[..., torch.Tensor], place: Place) -> Callable[..., torch.Tensor]:
    """Return `function`, whose result is a part of a sum on each rank, with the sum on every rank; the region goes on.

    For a product that a mixer's code computes itself, with a weight whose inputs are split.
    """

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return place.sum(function(*args, **kwargs))

    return computed


def over_all_ranks(function: Callable[..., Any], place: Place) -> Callable[..., torch.Tensor]:
    """Return `function`, a root-mean-square norm fused with a product of its output, for a width that the ranks share.

    It takes `x` [..., width] and `eps` and may gate behind the norm, as FLA's `rms_norm_linear` and
    `rms_norm_swish_gate_linear`. As `SplitNorm` does, the output is multiplied by the ratio of the roots.

    The function raises:
        PlanError: an argument of it that such a ratio can't be applied behind: a bias, a residual.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def local(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        for name in ("norm_bias", "linear_bias", "residual", "prenorm"):
            if (value := given.get(name)) is not None and value is not False:
                raise PlanError(
                    f"{function.__name__}: over_all_ranks takes no {name}: its part of the output is not in proportion to "
                    "the norm's; split the norm and the product apart, by split_norm() or gathered_in_region()"
                )
        output = function(*args, **kwargs)
        return (output * place.root_ratio(given["x"], given["eps"])).to(output.dtype)

    return local
