"""A plan may change the model that it splits, but not code that the whole model shares: both would be wrong alike."""

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
        VerifyError: names the replaced method or function.
    """
    before = _code(model)
    yield
    for holder, names in _code(model).items():
        known = before.get(holder, names)
        for name, value in names.items():
            # Most are unchanged.
            if (was := known.get(name)) is value or not _is_code(value):
                continue
            # Nobody uses a module's new name yet; a class's new name hides its base's.
            if isinstance(holder, type) or _is_code(was):
                where = f"{holder.__module__}.{holder.__qualname__}" if isinstance(holder, type) else holder
                raise VerifyError(
                    f"the plan replaced {where}.{name} for every model of this process, and so for the unsplit one of the "
                    "proof: change the style's own module, by a hook or by module.forward = ..., not its class or library"
                )


def _code(model: nn.Module) -> dict[type | str, dict[str, Any]]:
    """Return the members of classes, by class, and those of their modules, by the module's name."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    modules = dict.fromkeys([*(cls.__module__ for cls in classes), "torch.nn.functional"])
    holders = {cls: vars(cls) for cls in classes} | {
        n: vars(sys.modules[n]) for n in modules if n in sys.modules
    }
    return {holder: dict(names) for holder, names in holders.items()}


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, _CODE)
