"""Whether a Linear is called by its parent, which might read its weight instead, for a fused kernel.

A change of the Linear itself (its product in float8, an adapter) would then be left out without a word.
"""

import inspect
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import nn

from titanplans.errors import UserError
from titanplans.split.decoder import Elsewhere

Found = tuple[str, str, nn.Module]
"""A Linear whose weight is read, its parent's name, and the parent."""

Refusal = Callable[[list[Found]], UserError]
"""Makes the error of all of them."""


def unfuse(model: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """Let MLPs of flash-linear-attention call `down_proj`, if it is among `names`: else they call a kernel on its weight."""
    unfused = []
    for name, module in model.named_modules():
        if getattr(module, "fuse_swiglu", False) and f"{name}.down_proj".lstrip(".") in names:
            module.fuse_swiglu = False  # type: ignore[assignment]
            unfused.append(name)
    return tuple(unfused)


class Calls:
    """Lets the first forward of a model raise an error if one of its modules is not called where its parent is.

    Not for compiled blocks, whose graphs are made with the hooks and again without them: `read_weights` is for these.

    Args:
        model: whose forward it is.
        names: of the modules.
        refuse: makes the error.
    """

    def __init__(self, model: nn.Module, names: Collection[str], refuse: Refusal):
        self.names, self.refuse = tuple(names), refuse
        self.called: set[str] = set()
        watched = dict.fromkeys(n for name in names for n in (name, name.rpartition(".")[0]))
        self.handles: list[Any] = [
            model.get_submodule(name).register_forward_pre_hook(partial(self.note, name)) for name in watched
        ]
        self.handles.append(model.register_forward_hook(self.check))

    def note(self, name: str, module: nn.Module, args: Any) -> None:
        """Before the forward of a module."""
        self.called.add(name)

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self.handles:
            handle.remove()

    def check(self, model: nn.Module, args: Any, output: Any) -> None:
        """Behind the first forward."""
        self.remove()
        parents = {name: name.rpartition(".")[0] for name in self.names if name not in self.called}
        found = [
            (name, parent, model.get_submodule(parent))
            for name, parent in parents.items()
            if parent in self.called and not isinstance(model.get_submodule(name), Elsewhere)
        ]
        if found:
            raise self.refuse(found)


def read_weights(model: nn.Module, names: Collection[str]) -> list[Found]:
    """Return those of `names` whose weight the parent's own forward reads, by its source."""
    found = []
    for name in names:
        parent_name, _, own = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if hasattr(parent, "fuse_swiglu"):
            continue  # which `unfuse` has switched off
        try:
            source = inspect.getsource(type(parent).forward)
        except OSError:  # typed in, or compiled from a string
            continue
        if re.search(rf"\b{re.escape(own)}\.weight\b", source):
            found.append((name, parent_name, parent))
    return found
