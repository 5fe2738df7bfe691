"""What a cut's table says of each style: how it is installed on a module, and which collectives a call then takes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.styles.base import Style
from titanplans.split.costs import Call, ExpectedCollective
from titanplans.split.local_code import HeadRanks
from titanplans.split.state import key_of
from titanplans.split.stream import Border


class Site(NamedTuple):
    """Where a style is installed."""

    border: Border
    """Of the residual stream, at this module."""
    ranks: HeadRanks
    """The ranks that share what the module works on: in a mixer its heads, else a layer's weights."""


Install = Callable[[Any, nn.Module, Site], None]
"""Puts the hooks of a style on a module."""
Expect = Callable[[Any, nn.Module, Call], tuple[ExpectedCollective, ...]]
"""Returns the collectives of a call of a module with a style.

For a module that is never called, since other code reads its parameters, its region's rule returns them. A parameter's
layout says what reading it sends. A region's are those of entering and leaving it, wherever the sum is made.
"""


def _nothing(style: Style, module: nn.Module, site: Site) -> None:
    """Install nothing: the style only lays parameters out."""


class Rule(NamedTuple):
    """How a cut installs a style, and what a call then sends; None: nothing."""

    install: Install = _nothing
    expect: Expect | None = None


def on_input(
    change: Callable[[torch.Tensor], torch.Tensor],
    style: Style,
    name: str,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    """Return the arguments of a call of `module` with its input changed: the first positional one, or keyword `name`.

    Raises:
        PlanError: it was called without either.
    """
    if args:
        return (change(args[0]), *args[1:]), kwargs
    if name in kwargs:
        return args, {**kwargs, name: change(kwargs[name])}
    raise PlanError(
        f"it was called without a positional input and without '{name}' (got {', '.join(kwargs) or 'nothing'}): "
        + ("give its style input_name=" if hasattr(style, "input_name") else "give it by position"),
        key=key_of(module),
        style=style,
        module=module,
    )


def on_output(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Return the output of a module with its tensor changed, or the first of a tuple."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
