"""Puts a plan's numbers and functions of a rank into the code of split modules (`titanplans.plan.local_code`).

The module's forward stays its own: its methods are made anew with the rank's function under the name that they look up.
"""

import copy
from collections.abc import Mapping
from functools import cache
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.plan.local_code import Functions, calls, looks_up, methods
from titanplans.split.collectives import Group, sum_in_region
from titanplans.split.root_mean_square import root_ratio
from titanplans.split.state import specialise, subclass
from titanplans.split.stream import Border
from titanplans.torch_private.dispatch import tree_map


class HeadRanks(NamedTuple):
    """The ranks that share the heads of a mixer, which a plan's functions get as `SharingRanks`."""

    rank: int
    degree: int
    group: Group
    """For the collectives of `titanplans.split.collectives`."""
    border: Any
    """That of the stream: a `Border`."""
    order: tuple[int, ...]
    """The number in the group of each rank."""

    @property
    def copies(self) -> int:
        """The number of ranks that compute the same, whose gradients are summed."""
        return self.border.group[1]

    @property
    def parts(self) -> int:
        """The number of ranks that share a sequence, whose losses are summed."""
        return self.border.tokens.ranks

    def all_tokens(self, value: Any) -> Any:
        """Return `value` with all tokens in each tensor in it that has those of this rank alone (`Border.all_tokens`)."""
        border: Border = self.border
        return tree_map(lambda x: border.all_tokens(x) if isinstance(x, torch.Tensor) else x, value)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' parts; the region goes on with the sum on every rank."""
        return sum_in_region(part, self.group)

    def root_ratio(self, x: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the ratio [..., 1] of the root mean square of this rank's `x` [..., width] to that of all ranks'."""
        return root_ratio(x, epsilon, self.group)


def set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Set attributes of `module` by dotted name; a config on the way, or another object but a module, is copied first."""
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


def set_functions(module: nn.Module, functions: Functions, ranks: HeadRanks) -> None:
    """Let the methods of `module` call this rank's functions in place of those that their file imports or defines."""
    if functions:
        specialise(module, _calling(type(module), tuple(sorted(functions.items())), ranks))


@cache
def _calling(
    cls: type[nn.Module], functions: tuple[tuple[str, Any], ...], ranks: HeadRanks
) -> type[nn.Module]:
    """Subclass `cls`, once for modules with the same functions: repeated blocks share one compiled artefact."""
    replaced: dict[str, Any] = {}
    for method_name, method in methods(cls).items():
        for name, local in functions:
            if calls(method, name):
                method = replaced[method_name] = _with(method, name, local, ranks)
    return subclass(cls, replaced)


def _replaced(value: Any, path: list[str], local: Any, ranks: HeadRanks) -> Any:
    """Return `value`, a function, or a file of functions or a function that calls them, with this rank's at `path`."""
    if not path:
        return local(value, ranks)
    if isinstance(value, FunctionType):
        return _with(value, ".".join(path), local, ranks)
    inner = _replaced(getattr(value, path[0]), path[1:], local, ranks)
    return SimpleNamespace(**{**vars(value), path[0]: inner})


def _with(function: FunctionType, name: str, local: Any, ranks: HeadRanks) -> FunctionType:
    """Return `function` with this rank's function under `name` in its code, or in that of the function that it decorates."""
    known, closure = function.__globals__, function.__closure__
    if looks_up(function, name):
        first, *path = name.split(".")
        # A compiler that finds the name of a file among them reads that file's functions in place of these.
        known = {name: value for name, value in known.items() if name != "__name__"}
        known[first] = _replaced(function.__globals__[first], path, local, ranks)
    inner = getattr(function, "__wrapped__", None)
    decorates = isinstance(inner, FunctionType) and calls(inner, name)
    if decorates:
        changed = _with(inner, name, local, ranks)
        closure = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in closure or ())
    made = FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    made.__module__ = function.__module__
    if decorates:
        made.__wrapped__ = changed  # type: ignore[attr-defined]
    return made
