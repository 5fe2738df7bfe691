"""A plan may change the model that it splits, not code that the whole model runs, too: then both would be wrong alike."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from titanplans.errors import VerifyError

_CODE = (classmethod, staticmethod, property)


@contextmanager
def unpatched(model: nn.Module) -> Iterator[None]:
    """Refuse code in the body that replaces a method of one of `model`'s classes, or a function of their modules.

    Raises:
        VerifyError: names what was replaced.
    """
    before = _code(model)
    yield
    for holder, names in _code(model).items():
        known = before.get(holder, names)
        for name, value in names.items():
            # Most are what they were, also those that are no code.
            if (was := known.get(name)) is value or not _is_code(value):
                continue
            # A new name of a module is nobody's yet; one of a class hides that of its base.
            if isinstance(holder, type) or _is_code(was):
                where = f"{holder.__module__}.{holder.__qualname__}" if isinstance(holder, type) else holder
                raise VerifyError(
                    f"the plan replaced {where}.{name} for every model of this process, also for the whole one that a "
                    "proof compares with: let a style change the module that it is given, by a hook or by "
                    "module.forward = ..., not its class or library"
                )


def _code(model: nn.Module) -> dict[type | str, dict[str, Any]]:
    """Return what classes hold, methods among it, by class, and functions and classes by the name of their module."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    modules = dict.fromkeys([*(cls.__module__ for cls in classes), "torch.nn.functional"])
    holders = {cls: vars(cls) for cls in classes} | {
        n: vars(sys.modules[n]) for n in modules if n in sys.modules
    }
    return {holder: dict(names) for holder, names in holders.items()}


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, _CODE)
