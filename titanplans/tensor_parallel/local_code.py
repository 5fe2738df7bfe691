"""What a split module's own code has to know of this rank: numbers that count heads, and functions that depend on which.

A plan declares both (`TPPlan.local_attributes`, `TPPlan.local_functions`); nothing is guessed. The module's forward stays
its own.
"""

import copy
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import CellType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError
from titanplans.tensor_parallel.collectives import Group, group_of, sum_in_region
from titanplans.tensor_parallel.decoder import Decoder, join
from titanplans.tensor_parallel.local_parameters import subclass
from titanplans.tensor_parallel.styles import find_target, split_key
from titanplans.user_code import as_user_error

if TYPE_CHECKING:
    from titanplans.tensor_parallel.plan import TPPlan


class Place(NamedTuple):
    """Where on the TP mesh a rank stands."""

    rank: int
    """Of simulated ranks, a number of each: for arithmetic, not for branches."""
    degree: int
    group: Group
    """For the collectives of `titanplans.tensor_parallel.collectives`."""

    def __hash__(self) -> int:
        return hash((self.degree, self.group))  # the number of each of several ranks has none


Functions = Mapping[str, Callable[[Callable[..., Any], Place], Callable[..., Any]]]
"""By the name under which a module's code calls a function: what makes this rank's function of it.

"F.linear" is a function of the file `F`; "retention.decay" one that the function `retention` calls.
"""


def code_of_ranks(
    plan: Mapping[str, ParallelStyle], model: nn.Module, decoder: Decoder, source: "TPPlan"
) -> tuple[dict[str, dict[str, Any]], dict[str, Functions]]:
    """Return what the code of the split modules counts and calls on a rank, by the module's name.

    Raises:
        PlanError: a module has no such attribute, or its code calls no such function.
    """
    attributes: dict[str, dict[str, Any]] = {}
    functions: dict[str, Functions] = {}
    with as_user_error(f"plan {type(source).__name__}"):
        for key, make in source.model_functions(model).items():
            path, _, name = key.rpartition(".")
            functions[path] = {**functions.get(path, {}), name: make}
        attributes[""] = source.model_attributes(model)
    for name, mixer in decoder.mixers.items():
        if split_key(plan, name) is not None:
            owner = source.plan_of(mixer)
            with as_user_error(f"plan {type(owner).__name__}"):
                attributes[name] = {**owner.queries_per_group(mixer), **owner.local_attributes(mixer)}
                functions[name] = owner.local_functions(mixer)
    for name, mlp in decoder.mlps.items():
        if split_key(plan, name) is not None:
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
        if (found := find_target(name, model)) is None or found.parameter is not None:
            _check(
                model,
                "",
                (join(given, next(iter(functions[name]))), f"the model has no module '{name}'"),
                hook,
            )
        _check(model, name, _uncalled(model.get_submodule(name), functions[name], given), hook)
    return attributes, functions


def _check(model: nn.Module, name: str, fault: tuple[str, str] | None, hook: str) -> None:
    """Raise a PlanError of a `fault`, the name that the `hook` of a plan gives for the module `name`, and what is wrong."""
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


def set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Set attributes of `module` by dotted name; what is no module on the way, such as a config, is copied first."""
    for name, value in attributes.items():
        holder: Any = module
        *path, last = name.split(".")
        for step in path:
            inner = getattr(holder, step)
            if not isinstance(inner, nn.Module):
                inner = copy.copy(inner)
                setattr(holder, step, inner)
            holder = inner
        setattr(holder, last, value)


def _uncalled(module: nn.Module, functions: Functions, path: str) -> tuple[str, str] | None:
    """Return the function that can't be replaced in the code of `module`, which keys name by `path`, and why; or None."""
    for name in functions:
        if not any(_calls(method, name) for method in _methods(type(module)).values()):
            kind = type(module).__name__
            return (
                join(path, name),
                f"no method of {kind} calls a function of this name that its file imports or defines",
            )
    return None


def set_functions(module: nn.Module, functions: Functions, mesh: DeviceMesh) -> None:
    """Let the methods of `module` call this rank's functions in place of those that their file imports or defines."""
    if functions:
        place = Place(mesh.get_local_rank(), mesh.size(), group_of(mesh))
        module.__class__ = _calling(type(module), tuple(sorted(functions.items())), place)


@cache
def _calling(cls: type[nn.Module], functions: tuple[tuple[str, Any], ...], place: Place) -> type[nn.Module]:
    """Subclass `cls`, once for modules with the same functions: repeated blocks share one compiled artefact."""
    replaced: dict[str, Any] = {}
    for method_name, method in _methods(cls).items():
        for name, local in functions:
            if _calls(method, name):
                method = replaced[method_name] = _with(method, name, local, place)
    return subclass(cls, replaced)


def _methods(cls: type) -> dict[str, FunctionType]:
    """Return the methods of `cls` by name."""
    found = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    return {name: member for name, member in found.items() if isinstance(member, FunctionType)}


def _calls(function: FunctionType, name: str) -> bool:
    """Whether the code of `function`, or of what it decorates, looks `name` up in its file."""
    if _looks_up(function, name):
        return True
    inner = getattr(function, "__wrapped__", None)
    return isinstance(inner, FunctionType) and _calls(inner, name)


def _looks_up(function: FunctionType, name: str) -> bool:
    first, *path = name.split(".")
    if first not in function.__code__.co_names or first not in function.__globals__:
        return False
    if path and isinstance(called := function.__globals__[first], FunctionType):
        return _calls(called, ".".join(path))
    return set(path) <= set(function.__code__.co_names)


def _replaced(value: Any, path: list[str], local: Any, place: Place) -> Any:
    """Return `value`, a function, or a file of functions or a function that calls them, with this rank's at `path`."""
    if not path:
        return local(value, place)
    if isinstance(value, FunctionType):
        return _with(value, ".".join(path), local, place)
    inner = _replaced(getattr(value, path[0]), path[1:], local, place)
    return SimpleNamespace(**{**vars(value), path[0]: inner})


def _with(function: FunctionType, name: str, local: Any, place: Place) -> FunctionType:
    """Return `function` whose code, or that of what it decorates, finds this rank's function under `name`."""
    known, closure = function.__globals__, function.__closure__
    if _looks_up(function, name):
        first, *path = name.split(".")
        known = {**known, first: _replaced(known[first], path, local, place)}
    inner = getattr(function, "__wrapped__", None)
    decorates = isinstance(inner, FunctionType) and _calls(inner, name)
    if decorates:
        changed = _with(inner, name, local, place)
        closure = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in closure or ())
    made = FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    if decorates:
        made.__wrapped__ = changed  # type: ignore[attr-defined]
    return made


def alike(function: Callable[..., Any], place: Place) -> Callable[..., Any]:
    """Return `function` of what every rank has whole: its gradient is divided by the ranks, which sum theirs.

    For a loss beside the logits', such as the balance of a router inside a region.
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
        return sum_in_region(function(*args, **kwargs), place.group)

    return computed
