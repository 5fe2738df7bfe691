"""Styles with one fault, in what tensor parallelism installs."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate

from tests.support.tiny_model import TinyPlan, changed
from titanplans.split.border import Border
from titanplans.split.layout import Layout
from titanplans.styles.base import Site, Style
from titanplans.styles.replicated_in_region import ReplicatedInRegion

Install = Callable[[nn.Module, Border], None]
"""Installs a style's hooks on a module."""


def subclassed(style: Style, name: str, **methods: Any) -> Style:
    """Return a copy of `style` with some methods replaced."""
    fault = copy.copy(style)
    fault.__class__ = type(name, (type(style),), methods)
    return fault


def installed(style: Any, install: Callable[[Install, nn.Module, Border], None], name: str = "Faulty") -> Any:
    """Return a copy of `style` that `install(right, module, border)` installs; `right` installs it as `style` does."""

    def by_weights(_: Any, module: nn.Module, site: Site) -> None:
        def right(module: nn.Module, border: Border) -> None:
            style.by_weights(module, site._replace(border=border))

        install(right, module, site.border)

    return subclassed(style, name, by_weights=by_weights)


def leaving(style: Any, leave: Callable[[Border, nn.Module, Any], Any]) -> Any:
    """Return a copy of `style` that installs only one hook, which returns `leave(border, module, output)`."""

    def install(right: Install, module: nn.Module, border: Border) -> None:
        module.register_forward_hook(lambda module, args, output: leave(border, module, output))

    return installed(style, install)


def hooked(style: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of `style` that changes the module's output after the style's own hooks."""

    def install(right: Install, module: nn.Module, border: Border) -> None:
        right(module, border)
        module.register_forward_hook(lambda module, args, output: change(output))

    return installed(style, install)


def tiny_plan_with(**styles):
    """Return TinyPlan with other styles for some modules of its mixers: each is made by a function of the plan."""
    return changed(TinyPlan, lambda plan: {n: make(plan) for n, make in styles.items()})


class Unsummed(ReplicatedInRegion):
    """Declare the gradient Replicate although it is partial, so that it is not summed over the ranks."""

    def layouts(self, module, over):
        return {name: Layout(Replicate(), Replicate()) for name in module._parameters}
