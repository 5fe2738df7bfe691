"""Temporary replacement of an attribute, such as a function of a library."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In the body, set the attribute `name` of `owner` (a module, class or object) to `value`."""
    attributes = vars(owner)
    is_inherited, before = name not in attributes, attributes.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
