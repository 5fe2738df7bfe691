"""What a plan declares of a split module's own code: numbers that count heads, and functions that depend on the rank.

A plan declares both (`TPPlan.local_attributes`, `TPPlan.local_functions`); nothing is guessed. `plan.checks.code`
holds them against the module's code, and `titanplans.split.local_code` puts them in.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch

from titanplans.errors import PlanError


class SharingRanks(Protocol):
    """The ranks that share the heads, this one's number among them, and sums over them."""

    @property
    def rank(self) -> int: ...

    @property
    def degree(self) -> int: ...

    @property
    def parts(self) -> int:
        """The number of ranks that share a sequence, whose losses are summed."""
        ...

    @property
    def copies(self) -> int:
        """The number of ranks that compute the same, whose gradients are summed."""
        ...

    def all_tokens(self, value: Any) -> Any:
        """Return `value`, tensors in containers, with all tokens in each that has those of this rank alone."""
        ...

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' parts; the region goes on with the sum on every rank."""
        ...

    def root_ratio(self, x: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the ratio [..., 1] of the root mean square of this rank's `x` [..., width] to that of all ranks'."""
        ...


Functions = Mapping[str, Callable[[Callable[..., Any], SharingRanks], Callable[..., Any]]]
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


def count_once(function: Callable[..., Any], ranks: SharingRanks) -> Callable[..., Any]:
    """Return `function` of tensors that every rank has whole: its gradient is divided by the ranks, which sum theirs.

    For a loss besides that of the logits, such as the balance of a router inside a region. With context parallelism, where
    each rank's loss is its part of a sum, its value is divided by the ranks that share a sequence, too.
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


def summed(function: Callable[..., torch.Tensor], ranks: SharingRanks) -> Callable[..., torch.Tensor]:
    """Return `function`, whose result is a part of a sum on each rank, with the sum on every rank; the region goes on.

    For a product that a mixer's code computes itself, with a weight whose inputs are split.
    """

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return ranks.sum(function(*args, **kwargs))

    return computed


def over_all_ranks(function: Callable[..., Any], ranks: SharingRanks) -> Callable[..., torch.Tensor]:
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
        return (output * ranks.root_ratio(given["x"], given["eps"])).to(output.dtype)

    return local
