"""What a split leaves on a module: one `SplitState`, and subclasses of the module's class, each named after what it adds.

A split projection's method resolution order is `SplitLinear_tokens_to_heads`, `SplitLinear_local_parameters`,
`SplitLinear`, `Linear`. The classes are made at run time, so a split module can't be pickled, but its state dict can.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.split.border import Border
from titanplans.text import class_name

_NAME = "_split"


@dataclass
class SplitState:
    """The state of one split module."""

    key: str = ""
    """Its plan key."""
    style: ParallelStyle | None = None
    local_specs: dict[str, Any] = field(default_factory=dict)
    """How to get this rank's local tensors from the parameters, by name (`titanplans.split.module_weight.LocalSpec`)."""
    block_locals: dict[str, torch.Tensor] = field(default_factory=dict)
    """Local tensors made when the forward of the module's block begins, and dropped when it ends."""
    forward_locals: dict[str, torch.Tensor] | None = None
    """Local tensors that the module's forward has read so far; None outside of its forward."""
    border: Border | None = None
    """The border of the residual stream; set on the model and on the embedding."""
    uses_all_rows: bool = False
    """The module now multiplies local tokens by all rows that this rank stores, not only by those used in a mixer."""
    heads: Any = None
    """How a projection's output or input is exchanged between context-parallel ranks (`titanplans.split.tokens`)."""
    exchanges: bool = False
    """The module is a region in which tokens are exchanged for heads."""
    experts: Any = None
    """The ranks to which tokens are sent (`titanplans.split.experts`)."""
    dropped: torch.Tensor | None = None
    """Number of pairs of a token and an expert that this rank dropped since the last `take_dropped`; None: no forward."""
    product: Any = None
    """How the operands of a float8 product are sharded."""
    weight_scale: torch.Tensor | None = None
    """The scale of the full float8 weight, if it was computed together with those of other weights."""


def state_of(module: nn.Module) -> SplitState | None:
    """Return the state of a split module; None if `module` is not split."""
    return module.__dict__.get(_NAME)


def make_state(module: nn.Module) -> SplitState:
    """Return the state of `module`; mark it as split if it has none."""
    if (state := state_of(module)) is None:
        state = module.__dict__[_NAME] = SplitState()
        specialise(module, _split_class(type(module)))
    return state


def key_of(module: nn.Module) -> str:
    """Return the plan key of `module`; "" if it has none."""
    return "" if (state := state_of(module)) is None else state.key


def border_of_model(model: nn.Module) -> Border | None:
    """Return the border of the residual stream of `model`; None if it is not split."""
    return None if (state := state_of(model)) is None else state.border


def specialise(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give `module` the class `kind`, made by `subclass` from its current class."""
    module.__class__ = kind


def subclass(cls: type[nn.Module], members: Mapping[str, object], adds: str) -> type[nn.Module]:
    """Return a subclass of `cls` with `members`, named `SplitLinear_adds` for a split Linear, else `Linear_adds`."""
    prefix = "Split" if issubclass(cls, _Split) else ""
    return _derived(f"{prefix}{class_name(cls)}_{adds}", (cls,), members)


def _derived(name: str, bases: tuple[type, ...], members: Mapping[str, object]) -> type[nn.Module]:
    cls = bases[-1]
    attributes = {"__module__": cls.__module__, "unsplit_class": getattr(cls, "unsplit_class", cls)}
    return type(name, bases, {**attributes, **members})


class _Split(nn.Module):
    """Makes `print(model)` show a split module as `SplitLinear`, with its style and the local shapes of its parameters."""

    unsplit_class: type[nn.Module]

    def _get_name(self) -> str:
        return f"Split{self.unsplit_class.__name__}"

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), _described(self))))


@cache
def _split_class(cls: type[nn.Module]) -> type[nn.Module]:
    return _derived(f"Split{class_name(cls)}", (_Split, cls), {})


def _described(module: nn.Module) -> str:
    """Return the style of a split module and the local shapes of its parameters, as text."""
    state = state_of(module)
    if state is None or state.style is None:
        return ""
    shapes = {
        name: tuple(param.to_local().shape)
        for name, param in module._parameters.items()
        if isinstance(param, DTensor)
    }
    local = "".join(f", local {name} {list(shape)}" for name, shape in shapes.items())
    return f"{type(state.style).__name__}{local}"
