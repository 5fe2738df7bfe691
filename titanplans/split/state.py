"""What a split leaves on a module: one `SplitState`, and subclasses of the module's class, each named for what it adds.

The method resolution order of a split projection is `SplitLinear_tokens_to_heads`, `SplitLinear_local_parameters`,
`SplitLinear`, `Linear`. `print(model)` shows `SplitLinear`, its style, and the local shapes of its parameters. The classes
are made at run time, so a split module can't be pickled; its state dict can.
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
    """The split of one module."""

    key: str = ""
    """Its plan key."""
    style: ParallelStyle | None = None
    local_specs: dict[str, Any] = field(default_factory=dict)
    """How this rank's local tensors follow from its parameters, by name (`titanplans.split.module_weight.LocalSpec`)."""
    block_locals: dict[str, torch.Tensor] = field(default_factory=dict)
    """Local tensors that were made as the block's forward began, until it ends."""
    forward_locals: dict[str, torch.Tensor] | None = None
    """Local tensors that its own forward has asked for; None while that does not run."""
    border: Border | None = None
    """The model's, and the embedding's: the border of the residual stream."""
    reads_all: bool = False
    """Its own tokens are multiplied with all that this rank holds of its parameters, not with its shard in a mixer."""
    heads: Any = None
    """How its output or its input is exchanged between ranks that share a sequence (`titanplans.split.tokens`)."""
    exchanges: bool = False
    """It is a region in which tokens are exchanged for heads."""
    experts: Any = None
    """The ranks to which its rows are sent (`titanplans.split.experts`)."""
    dropped: torch.Tensor | None = None
    """How many of this rank's pairs of a row and an expert were left out since this was read; None: no forward."""
    product: Any = None
    """How a float8 product lies on the ranks."""
    weight_scale: torch.Tensor | None = None
    """The scale of the full float8 weight, where it was sought together with others'."""


def state_of(module: nn.Module) -> SplitState | None:
    """Return the state of a split module; None if `module` is not split."""
    return module.__dict__.get(_NAME)


def make_state(module: nn.Module) -> SplitState:
    """Return the state of `module`, which from now on is a split one."""
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
    """Give `module` the class `kind`, a `subclass` of its own."""
    module.__class__ = kind


def subclass(cls: type[nn.Module], members: Mapping[str, object], adds: str) -> type[nn.Module]:
    """Return a subclass of `cls` with `members`, called `SplitLinear_adds` if a Linear is split, else `Linear_adds`."""
    prefix = "Split" if issubclass(cls, _Split) else ""
    return _derived(f"{prefix}{class_name(cls)}_{adds}", (cls,), members)


def _derived(name: str, bases: tuple[type, ...], members: Mapping[str, object]) -> type[nn.Module]:
    cls = bases[-1]
    own = {"__module__": cls.__module__, "unsplit_class": getattr(cls, "unsplit_class", cls)}
    return type(name, bases, {**own, **members})


class _Split(nn.Module):
    """Printed with the style of a split module and its local shapes."""

    unsplit_class: type[nn.Module]

    def _get_name(self) -> str:
        return f"Split{self.unsplit_class.__name__}"

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), _described(self))))


@cache
def _split_class(cls: type[nn.Module]) -> type[nn.Module]:
    return _derived(f"Split{class_name(cls)}", (_Split, cls), {})


def _described(module: nn.Module) -> str:
    """Return the style of a split module, and the local shapes of its parameters, in words."""
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
