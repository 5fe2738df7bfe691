"""`unpatched`: refuse a plan that replaces code which the unsplit model runs, too: both models could then be equally
wrong."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from titanplans.errors import VerifyError

_CODE = (classmethod, staticmethod, property)


@contextmanager
def unpatched(model: nn.Module) -> Iterator[None]:
    """Raise an error if the body replaces a method of a class of `model`, or a function of these classes' Python modules.

    Raises:
        VerifyError: names the replaced method or function.
    """
    before = _members(model)
    yield
    for holder, members in _members(model).items():
        members_before = before.get(holder, members)
        for name, value in members.items():
            if (value_before := members_before.get(name)) is value or not _is_code(value):
                continue
            # A function that is new in a Python module is unused, but a method that is new in a class hides a base
            # class's method.
            if isinstance(holder, type) or _is_code(value_before):
                where = f"{holder.__module__}.{holder.__qualname__}" if isinstance(holder, type) else holder
                raise VerifyError(
                    f"the plan replaced {where}.{name} for every model of this process, and so for the unsplit model of "
                    "the proof: change the style's own module, with a hook or with module.forward = ..., not its "
                    "class or library"
                )


def _members(model: nn.Module) -> dict[type | str, dict[str, Any]]:
    """Return the members of the classes of `model`, by class, and of their Python modules, by the module's name."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    modules = dict.fromkeys([*(cls.__module__ for cls in classes), "torch.nn.functional"])
    holders = {cls: vars(cls) for cls in classes} | {
        n: vars(sys.modules[n]) for n in modules if n in sys.modules
    }
    return {holder: dict(members) for holder, members in holders.items()}


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, _CODE)
