"""Styles with a fault: the cut by weights installs them in another way; nothing else changes."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from titanplans.plan.styles.base import Style
from titanplans.split.stream import Border
from titanplans.split.tensors.by_weights import RULES, rule_of
from titanplans.split.tensors.rules import Site

Install = Callable[[nn.Module, Border], None]
"""Puts a style's hooks on a module."""


def subclassed(style: Style, name: str, **methods: Any) -> Style:
    """Return a copy of `style` with some methods replaced; they get the copy as `self`."""
    fault = copy.copy(style)
    fault.__class__ = type(name, (type(style),), methods)
    return fault


def installed(style: Any, install: Callable[[Install, nn.Module, Border], None], name: str = "Faulty") -> Any:
    """Return a copy of `style` that is installed by `install(right, module, border)`; `right` installs as the cut does."""
    rule = rule_of(style)

    def wrong(_: Any, module: nn.Module, site: Site) -> None:
        def right(module: nn.Module, border: Border) -> None:
            rule.install(style, module, site._replace(border=border))

        install(right, module, site.border)

    fault = subclassed(style, name)
    RULES[type(fault)] = rule._replace(install=wrong)
    return fault


def leaving(style: Any, leave: Callable[[Border, nn.Module, Any], Any]) -> Any:
    """Return a copy of `style` with one hook only: the output becomes `leave(border, module, output)`."""

    def install(right: Install, module: nn.Module, border: Border) -> None:
        module.register_forward_hook(lambda module, args, output: leave(border, module, output))

    return installed(style, install)


def hooked(style: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of `style` that changes the module's output after the style's own hooks."""

    def install(right: Install, module: nn.Module, border: Border) -> None:
        right(module, border)
        module.register_forward_hook(lambda module, args, output: change(output))

    return installed(style, install)
