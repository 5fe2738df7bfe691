"""A function of a library that is another one while a body runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let the attribute `name` of `owner`, a module, a class or an object, be `value` inside."""
    own = vars(owner)
    inherited, before = name not in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
