"""A module's own code on one rank: the numbers and functions that a plan gives it in place of the unsplit model's.

A plan declares both (`TPPlan.local_attributes`, `TPPlan.local_functions`), nothing is guessed, and `plan.checks.code` holds
them against the module's code. The module's forward stays its own: its methods are made anew with the rank's function under
the name that they look up.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.split.border import Border
from titanplans.split.collectives import Group, sum_in_region
from titanplans.split.root_mean_square import root_ratio
from titanplans.split.state import specialise, subclass
from titanplans.torch_private.dispatch import tree_map


class HeadRanks(NamedTuple):
    """The ranks that the heads of a mixer are split over; the functions of a plan (`local_functions`) get them."""

    rank: int
    degree: int
    group: Group
    """For the collectives of `titanplans.split.collectives`."""
    border: Any
    """That of the stream: a `Border`."""
    order: tuple[int, ...]
    """`order[rank]`: the index in `group` of the rank with the heads number `rank`: (0, 2, 1, 3) for tp 2 x cp 2, where
    heads go to CP ranks of one TP rank first, and the group numbers TP ranks first."""

    @property
    def copies(self) -> int:
        """The number of ranks that compute the same, whose gradients are summed."""
        return self.border.group[1]

    @property
    def parts(self) -> int:
        """The number of ranks that share a sequence, whose losses are summed."""
        return self.border.tokens.ranks

    def all_tokens(self, value: Any) -> Any:
        """Return `value` with all tokens in each tensor in it that has this rank's alone (`Stream.all_tokens`)."""
        border: Border = self.border
        return tree_map(lambda x: border.stream.all_tokens(x) if isinstance(x, torch.Tensor) else x, value)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' partial tensors; the region goes on with the sum on every rank."""
        return sum_in_region(part, self.group)

    def root_ratio(self, x: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the ratio [..., 1] of the root mean square of this rank's `x` [..., width] to that of all ranks'."""
        return root_ratio(x, epsilon, self.group)


Functions = Mapping[str, Callable[[Callable[..., Any], HeadRanks], Callable[..., Any]]]
"""By the name under which a module's code calls a function: the maker of this rank's function from it.

"F.linear" is a function of the file `F`; "retention.decay" one that the function `retention` calls.
"""


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
    names, (first, *path) = _names(function.__code__), name.split(".")
    if first not in names or first not in function.__globals__:
        return False
    if path and isinstance(called := function.__globals__[first], FunctionType):
        return calls(called, ".".join(path))
    return names.issuperset(path)


def _names(code: CodeType) -> set[str]:
    """Return the names that `code`, with its lambdas and generators, looks up."""
    return set(code.co_names).union(
        *(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType))
    )


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
    return subclass(cls, replaced, "local_functions")


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


def count_once(function: Callable[..., Any], ranks: HeadRanks) -> Callable[..., Any]:
    """Return `function` of replicated tensors: its gradient is divided by the ranks, which sum theirs.

    For a loss besides that of the logits, such as the balance of a router inside a region. With context parallelism, where
    each rank's loss is partial, its value is divided by the ranks that share a sequence, too.
    """

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = ranks.all_tokens((args, kwargs))
        value = function(*args, **kwargs)
        if not isinstance(value, torch.Tensor):
            return value
        value = value / ranks.parts
        if value.requires_grad:
            value.register_hook(lambda grad: grad / ranks.copies)
        return value

    return computed


def summed(function: Callable[..., torch.Tensor], ranks: HeadRanks) -> Callable[..., torch.Tensor]:
    """Return `function`, whose result is partial, with the sum on every rank; the region goes on.

    For a product that a mixer's code computes itself, with a weight whose inputs are split.
    """

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return ranks.sum(function(*args, **kwargs))

    return computed


def over_all_ranks(function: Callable[..., Any], ranks: HeadRanks) -> Callable[..., torch.Tensor]:
    """Return `function`, a root-mean-square norm fused with a product of its output, for a width that the ranks share.

    It takes `x` [..., width] and `eps` and may gate after the norm, as FLA's `rms_norm_linear` and
    `rms_norm_swish_gate_linear`. As `SplitNorm` does, the output is multiplied by the ratio of the roots.

    The function raises:
        PlanError: an argument after which such a ratio can't be applied: a bias, a residual.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def local(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        for name in ("norm_bias", "linear_bias", "residual", "prenorm"):
            if (value := arguments.get(name)) is not None and value is not False:
                raise PlanError(
                    f"{function.__name__}: over_all_ranks takes no {name}: the output would not be proportional to the "
                    "norm's ratio; split the norm and the product apart, by split_norm() or gathered_in_region()"
                )
        output = function(*args, **kwargs)
        return (output * ranks.root_ratio(arguments["x"], arguments["eps"])).to(output.dtype)

    return local
