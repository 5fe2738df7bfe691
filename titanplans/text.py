"""The smallest parts of what commands and logs print: values, columns, lists of names, numbers with their noun, bytes."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def show(value: Any) -> str:
    """Write a value on one line, in TOML's words: true, not True."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(show, value)) + "]"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{show(key)} = {show(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, int) and value.bit_length() > 64:
        text = f"{value:#x}"  # Python writes no thousands of decimal digits
    elif isinstance(value, type):
        text = value.__qualname__
    else:
        made_of_fields = dataclasses.is_dataclass(value) or hasattr(type(value), "model_fields")
        text = f"{type(value).__name__}(...)" if made_of_fields else str(value)
    return " ".join(text.split())


def columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Return `rows` of cells as lines of equally wide columns; those of the numbers in `right` are set flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first of `names`, and how many more there are: "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(number: int, noun: str) -> str:
    """Return "1 graph", "2 graphs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def in_bytes(number: int) -> str:
    """Return a number of bytes with its unit: "768 B", "65.5 kB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"


def class_name(instance: object) -> str:
    """Return the name of a class, or of an object's; of a split module's, the one before: "Linear" for a SplitLinear."""
    cls = instance if isinstance(instance, type) else type(instance)
    return getattr(cls, "whole_class", cls).__name__
