"""Replace attributes and functions that a module's own code uses, so that the code is correct on one rank's shards.

A plan declares both (`TPPlan.local_attributes`, `TPPlan.local_functions`); nothing is guessed. `plan.checks.code` checks
them against the module's code. Start at `set_attributes` and `set_functions`.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
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
    """The ranks that the heads of a mixer are split over; each maker in a plan's `local_functions` gets them."""

    rank: int
    degree: int
    group: Group
    """The group of these ranks, for the collectives of `titanplans.split.collectives`."""
    border: Any
    """The `Border` of the model's residual stream."""
    order: tuple[int, ...]
    """`order[i]`: the index in `group` of the rank with the i-th slice of the heads. For tp 2 x cp 2 it is (0, 2, 1, 3): a
    TP rank's heads are split over its CP ranks, while in the group the TP ranks of one CP rank are neighbours."""

    @property
    def tp_degree(self) -> int:
        """Number of ranks that compute the same replicated values, whose gradients are summed."""
        return self.border.group[1]

    @property
    def cp_degree(self) -> int:
        """Number of context-parallel ranks, whose losses are summed."""
        return self.border.tokens.ranks

    def all_tokens(self, value: Any) -> Any:
        """Gather over the CP ranks each tensor in `value` that has only local tokens (`Stream.all_tokens`)."""
        border: Border = self.border
        return tree_map(lambda x: border.stream.all_tokens(x) if isinstance(x, torch.Tensor) else x, value)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' partial tensors, for later work in the region, which the ranks split."""
        return sum_in_region(partial, self.group)

    def root_ratio(self, x: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the RMS of this rank's slice `x` [..., width] divided by the RMS of the full width, [..., 1]."""
        return root_ratio(x, epsilon, self.group)


FunctionMaker = Callable[[Callable[..., Any], HeadRanks], Callable[..., Any]]
Functions = Mapping[str, FunctionMaker]
"""Maps the name under which a module's code calls a function to a maker of the local function: maker(function, ranks).

"F.linear" is the function `linear` of the module `F`; "retention.decay" the function `decay` that the function
`retention` calls.
"""


def methods(cls: type) -> dict[str, FunctionType]:
    """Return the methods of `cls` by name, inherited ones included."""
    members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    return {name: member for name, member in members.items() if isinstance(member, FunctionType)}


def calls(function: FunctionType, name: str) -> bool:
    """Whether the code of `function`, or of the function that it decorates, looks up `name` in its globals."""
    if looks_up(function, name):
        return True
    inner = getattr(function, "__wrapped__", None)
    return isinstance(inner, FunctionType) and calls(inner, name)


def looks_up(function: FunctionType, name: str) -> bool:
    """Whether the code of `function` itself looks up `name` in its globals."""
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
    """Set attributes of `module` by dotted name.

    An object on the path that is not a module, such as a config, is copied first, since other modules may share it.
    """
    for name, value in attributes.items():
        holder: Any = module
        *path, last = name.split(".")
        for attribute in path:
            inner = getattr(holder, attribute)
            if not isinstance(inner, nn.Module):
                inner = copy.copy(inner)
                setattr(holder, attribute, inner)
            holder = inner
        setattr(holder, last, value)


def set_functions(module: nn.Module, functions: Functions, ranks: HeadRanks) -> None:
    """Let the methods of `module` call local functions instead of the functions that their file imports or defines."""
    if functions:
        specialise(module, _with_local_functions(type(module), tuple(sorted(functions.items())), ranks))


@cache
def _with_local_functions(
    cls: type[nn.Module], functions: tuple[tuple[str, Any], ...], ranks: HeadRanks
) -> type[nn.Module]:
    """Subclass `cls`, once for modules with the same functions, so that repeated blocks share one compiled artefact."""
    replaced: dict[str, Any] = {}
    for method_name, method in methods(cls).items():
        for name, local in functions:
            if calls(method, name):
                method = replaced[method_name] = _rebind(method, name, local, ranks)
    return subclass(cls, replaced, "local_functions")


def _replace_at(value: Any, path: list[str], local: Any, ranks: HeadRanks) -> Any:
    """Return a copy of `value`, a function or a Python module, in which the function at `path` is replaced."""
    if not path:
        return local(value, ranks)
    if isinstance(value, FunctionType):
        return _rebind(value, ".".join(path), local, ranks)
    inner = _replace_at(getattr(value, path[0]), path[1:], local, ranks)
    return SimpleNamespace(**{**vars(value), path[0]: inner})


def _rebind(function: FunctionType, name: str, local: Any, ranks: HeadRanks) -> FunctionType:
    """Return a copy of `function` that calls the local function at `name`, also inside the function that it
    decorates."""
    namespace, closure = function.__globals__, function.__closure__
    if looks_up(function, name):
        first, *path = name.split(".")
        # With `__name__` a compiler would look up functions in the imported module instead of in this namespace.
        namespace = {key: value for key, value in namespace.items() if key != "__name__"}
        namespace[first] = _replace_at(function.__globals__[first], path, local, ranks)
    inner = getattr(function, "__wrapped__", None)
    decorates = isinstance(inner, FunctionType) and calls(inner, name)
    if decorates:
        changed = _rebind(inner, name, local, ranks)
        closure = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in closure or ())
    copied = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__, copied.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    copied.__module__ = function.__module__
    if decorates:
        copied.__wrapped__ = changed  # type: ignore[attr-defined]
    return copied


def count_once(function: Callable[..., Any], ranks: HeadRanks) -> Callable[..., Any]:
    """Wrap `function`, which computes the same value on all TP ranks: divide its gradient by the number of these ranks.

    For an additional loss whose gradient the TP ranks sum, such as the load-balancing loss of a router inside a region.
    Each CP rank's loss is partial, so the value is also divided by the number of CP ranks.
    """

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = ranks.all_tokens((args, kwargs))
        value = function(*args, **kwargs)
        if not isinstance(value, torch.Tensor):
            return value
        value = value / ranks.cp_degree
        if value.requires_grad:
            value.register_hook(lambda grad: grad / ranks.tp_degree)
        return value

    return computed


def heads_of_result(heads: int) -> FunctionMaker:
    """Return a maker of local functions whose result has only this rank's heads.

    For values [heads, ...] or [batch x heads, ...] that a model computes for each head from the head's index and passes to
    its mixers, such as ALiBi's biases.

    Args:
        heads: the number of heads of the unsplit model.
    """

    # A partial, so that two makers with the same number of heads look the same.
    return partial(_heads_of_result, heads=heads)


def _heads_of_result(
    function: Callable[..., torch.Tensor], ranks: HeadRanks, heads: int
) -> Callable[..., torch.Tensor]:
    local = heads // ranks.degree

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
        by_head = function(*args, **kwargs).unflatten(0, (-1, heads))
        return by_head.narrow(1, local * ranks.rank, local).flatten(0, 1)

    return computed


def without_kernel(function: Callable[..., Any], ranks: HeadRanks) -> Callable[..., None]:
    """Replace `function`, a kernel that includes a sum over all heads or channels, by a function that returns None.

    transformers calls such a kernel if a library for GPUs is installed, and its own modules if the kernel returns None.
    """
    return lambda *args, **kwargs: None


def sum_over_ranks(function: Callable[..., torch.Tensor], ranks: HeadRanks) -> Callable[..., torch.Tensor]:
    """Wrap `function`, whose result is partial, to return the sum on every rank, inside the region.

    For a product that a mixer's code computes itself, with a weight that is sharded by inputs.
    """

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return ranks.sum(function(*args, **kwargs))

    return computed


def full_width_norm(function: Callable[..., Any], ranks: HeadRanks) -> Callable[..., torch.Tensor]:
    """Wrap a function that fuses a root-mean-square norm with the next product, for a width that is split over the ranks.

    `function` takes `x` [..., width] and `eps`, and may gate after the norm, like FLA's `rms_norm_linear` and
    `rms_norm_swish_gate_linear`. Its output is multiplied by slice RMS / full RMS, as in `SplitNorm`.

    The wrapped function raises:
        PlanError: for an argument to which such a ratio does not apply: a bias, a residual.
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
                    f"{function.__name__}: full_width_norm takes no {name}, since the output would not be proportional "
                    "to the norm: compute the norm and the product separately, and give the norm split_norm() or "
                    "gathered_in_region()"
                )
        output = function(*args, **kwargs)
        return (output * ranks.root_ratio(arguments["x"], arguments["eps"])).to(output.dtype)

    return local
