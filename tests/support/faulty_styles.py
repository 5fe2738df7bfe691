"""Make faulty styles: copies of a style with one fault in its hooks."""

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
"""A function that installs a style's hooks on a module."""


def subclassed(style: Style, name: str, **methods: Any) -> Style:
    """Return a copy of `style` with some methods replaced."""
    fault = copy.copy(style)
    fault.__class__ = type(name, (type(style),), methods)
    return fault


def installed(style: Any, install: Callable[[Install, nn.Module, Border], None], name: str = "Faulty") -> Any:
    """Return a copy of `style` whose hooks `install(original, module, border)` installs.

    `original(module, border)` installs the hooks of `style`.
    """

    def by_weights(_: Any, module: nn.Module, site: Site) -> None:
        def original(module: nn.Module, border: Border) -> None:
            style.by_weights(module, site._replace(border=border))

        install(original, module, site.border)

    return subclassed(style, name, by_weights=by_weights)


def leaving(style: Any, leave: Callable[[Border, nn.Module, Any], Any]) -> Any:
    """Return a copy of `style` that installs only one hook, which returns `leave(border, module, output)`."""

    def install(original: Install, module: nn.Module, border: Border) -> None:
        module.register_forward_hook(lambda module, args, output: leave(border, module, output))

    return installed(style, install)


def hooked(style: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of `style` that passes the module's output through `change`, after the style's own hooks."""

    def install(original: Install, module: nn.Module, border: Border) -> None:
        original(module, border)
        module.register_forward_hook(lambda module, args, output: change(output))

    return installed(style, install)


def tiny_plan_with(**styles):
    """Return TinyPlan with some styles of its mixers replaced; `styles` maps a module's name to a function plan -> style."""
    return changed(TinyPlan, lambda plan: {n: make(plan) for n, make in styles.items()})


class Unsummed(ReplicatedInRegion):
    """Declares the gradient Replicate although it is Partial, so that it is not summed over the ranks."""

    def layouts(self, module, over):
        return {name: Layout(Replicate(), Replicate()) for name in module._parameters}
