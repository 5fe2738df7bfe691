"""What a split module's own code has to know of this rank: numbers that count heads, and functions that depend on which.

A plan declares both (`TPPlan.local_attributes`, `TPPlan.local_functions`); nothing is guessed. The module's forward stays
its own.
"""

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanplans.errors import PlanError
from titanplans.tensor_parallel.collectives import Group
from titanplans.tensor_parallel.local_parameters import subclass


class Place(NamedTuple):
    """Where on the TP mesh a rank stands."""

    rank: int
    """Of simulated ranks, a number of each: for arithmetic, not for branches."""
    degree: int
    group: Group
    """For the collectives of `titanplans.tensor_parallel.collectives`."""


Functions = Mapping[str, Callable[[Callable[..., Any], Place], Callable[..., Any]]]
"""By the name under which a module's code calls a function: what makes this rank's function of it."""


def check_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> str | None:
    """Return why an attribute can't be set on `module`, or None."""
    for name in attributes:
        holder, path = module, name.split(".")
        for step in path:
            if not hasattr(holder, step):
                return (
                    f"its plan's local_attributes name '{name}', but {type(holder).__name__} has no '{step}': give the "
                    "names that the module's code reads"
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


def check_functions(module: nn.Module, functions: Functions) -> str | None:
    """Return why a function can't be replaced in the code of `module`, or None."""
    for name in functions:
        if not any(_callers(type(module), name)):
            return (
                f"its plan's local_functions name '{name}', but no method of {type(module).__name__} calls a function of "
                "this name that its file imports or defines"
            )
    return None


def set_functions(module: nn.Module, functions: Functions, mesh: DeviceMesh) -> None:
    """Let the methods of `module` call this rank's functions in place of those that their file imports or defines."""
    if functions:
        group = (mesh.get_group().group_name, mesh.size())
        place = Place(mesh.get_local_rank(), mesh.size(), group)
        module.__class__ = _calling(type(module), tuple(sorted(functions.items())), place)


@cache
def _calling(cls: type[nn.Module], functions: tuple[tuple[str, Any], ...], place: Place) -> type[nn.Module]:
    """Subclass `cls`, once for modules with the same functions: repeated blocks share one compiled artefact."""
    methods: dict[str, Any] = {}
    for name, local in functions:
        for method_name, method in _callers(cls, name):
            theirs = methods.get(method_name, method)
            known = {**theirs.__globals__, name: local(theirs.__globals__[name], place)}
            methods[method_name] = _with_globals(theirs, known)
    return subclass(cls, methods)


def _callers(cls: type, name: str) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the methods of `cls`, by name, whose code looks `name` up in its file."""
    seen = set()
    for base in cls.__mro__:
        for method_name, method in vars(base).items():
            if method_name in seen or not isinstance(method, types.FunctionType):
                continue
            seen.add(method_name)
            if name in method.__code__.co_names and name in method.__globals__:
                yield method_name, method


def _with_globals(function: types.FunctionType, known: dict[str, Any]) -> types.FunctionType:
    """Return `function` whose code finds `known` where it looked into its file."""
    made = types.FunctionType(
        function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    return made


def refuse(key: str, module: nn.Module, reason: str) -> None:
    """Raise a PlanError for the mixer `module` at `key`."""
    raise PlanError(f"{key} ({type(module).__name__}): {reason}")
