"""Parameters that a split has replaced: reading their `grad` raises, so an optimizer that still holds them fails."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from titanplans.errors import ParallelError

_NAME, _SUCCESSOR = "_replaced_name", "_replaced_by"


@contextmanager
def replacing(*modules: nn.Module) -> Iterator[None]:
    """On exit without an error, retire the parameters of `modules` that were replaced inside the context."""
    before = [parameters_of(module) for module in modules]
    yield
    for module, parameters in zip(modules, before, strict=True):
        retire_replaced(module, parameters)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `module` by name; a tied parameter occurs under each of its names."""
    return dict(module.named_parameters(remove_duplicate=False))


def retire_replaced(module: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Retire the parameters in `before` that `module` no longer has: from then on using their `grad` raises an error.

    The optimizers that hold a parameter can't be found from the parameter. But every optimizer, of torch or of another
    library, first reads the `grad` of its parameters, and so does gradient clipping.
    """
    now = parameters_of(module)
    current_ids = {id(parameter) for parameter in now.values()}
    for name, old in before.items():
        if id(old) not in current_ids and _NAME not in old.__dict__:
            old.__dict__ |= {_NAME: name, _SUCCESSOR: now.get(name)}
            old.__class__ = _retired(type(old))  # type: ignore[assignment]


def successor_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter that has replaced `parameter`, or `parameter` itself if none has."""
    while (successor := parameter.__dict__.get(_SUCCESSOR)) is not None:
        parameter = successor
    return parameter


@cache
def _retired(cls: type[torch.Tensor]) -> type[torch.Tensor]:
    def refuse(self: Any, *_: Any) -> None:
        raise ParallelError(
            f"parameter '{self.__dict__[_NAME]}' was replaced when its model was split or sharded, so it never gets a "
            "gradient, and its optimizer would train nothing: create the optimizer with the model's parameters "
            "afterwards, or pass it to ParallelManager.prepare_optimizer before its first step"
        )

    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), {**members, "grad": property(refuse, refuse)})
