"""Linears that are not called because their parent's fused kernel uses their weight.

If such a Linear is changed (converted to float8, or given an adapter), the change has no effect, and nothing reports
it.
"""

import inspect
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from titanplans.errors import UserError
from titanplans.split.decoder import AbsentModule


class Bypassed(NamedTuple):
    """A Linear that is not called, and the parent module whose forward uses its weight."""

    name: str
    parent_name: str
    parent: nn.Module


Refusal = Callable[[list[Bypassed]], UserError]
"""Makes an error that names all bypassed Linears."""


def unfuse(model: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """Make MLPs of flash-linear-attention whose `down_proj` is in `names` call this module, instead of a fused kernel that
    uses its weight.

    Returns:
        The names of these MLPs.
    """
    unfused = []
    for name, module in model.named_modules():
        if getattr(module, "fuse_swiglu", False) and f"{name}.down_proj".lstrip(".") in names:
            module.fuse_swiglu = False  # type: ignore[assignment]
            unfused.append(name)
    return tuple(unfused)


class BypassCheck:
    """Raises an error after a model's first forward if a Linear was not called in it, but its parent was.

    Use `find_bypassed` for compiled blocks: their graphs would be traced with the hooks, and again once the hooks are
    removed.

    Args:
        model: the model whose first forward is watched.
        names: the names of the Linears.
        refuse: makes the error.
    """

    def __init__(self, model: nn.Module, names: Collection[str], refuse: Refusal):
        self.names, self.refuse = tuple(names), refuse
        self.called: set[str] = set()
        watched = dict.fromkeys(n for name in names for n in (name, _parent(name)))
        self.handles: list[Any] = [
            model.get_submodule(name).register_forward_pre_hook(partial(self.note, name)) for name in watched
        ]
        self.handles.append(model.register_forward_hook(self.check))

    def note(self, name: str, module: nn.Module, args: Any) -> None:
        """Record the call of a module; a forward pre-hook."""
        self.called.add(name)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()

    def check(self, model: nn.Module, args: Any, output: Any) -> None:
        """Raise the error if a Linear was bypassed; a forward hook."""
        self.remove()
        bypassed = [
            Bypassed(name, _parent(name), model.get_submodule(_parent(name)))
            for name in self.names
            if name not in self.called
            and _parent(name) in self.called
            and not isinstance(model.get_submodule(name), AbsentModule)
        ]
        if bypassed:
            raise self.refuse(bypassed)


def find_bypassed(model: nn.Module, names: Collection[str]) -> list[Bypassed]:
    """Return the Linears in `names` whose weight the source code of their parent's forward uses."""
    bypassed = []
    for name in names:
        parent = model.get_submodule(_parent(name))
        if hasattr(parent, "fuse_swiglu"):
            continue  # `unfuse` has turned the kernel off
        try:
            source = inspect.getsource(type(parent).forward)
        except OSError:  # typed interactively, or compiled from a string
            continue
        if re.search(rf"\b{re.escape(name.rpartition('.')[2])}\.weight\b", source):
            bypassed.append(Bypassed(name, _parent(name), parent))
    return bypassed


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
