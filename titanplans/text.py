"""The smallest parts of what commands and logs print: values, columns, lists of names, numbers with their noun, bytes."""

import dataclasses
import inspect
import itertools
import os
import re
import shutil
import sys
import textwrap
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


def columns(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int | None = None
) -> list[str]:
    """Return `rows` of cells as lines of equally wide columns; those of the numbers in `right` are set flush right.

    Where they are wider than `width`, the terminal's if it is None, cells are wrapped, the widest first, but not within a
    word. Columns for which that is not enough follow below, after the first column again.
    """
    width = width or terminal_width()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is None or _total(widths) <= width:
        return _set(rows, widths, right)
    least = [
        max(len(piece.rstrip()) for cell in column for piece in _pieces(cell))
        for column in zip(*rows, strict=True)
    ]
    lines, rest = list[str](), list(range(1, len(widths)))
    while rest or not lines:
        shown = [0, *rest[:1]]
        while len(shown) <= len(rest) and _total([least[i] for i in [*shown, rest[len(shown) - 1]]]) <= width:
            shown.append(rest[len(shown) - 1])
        rest = rest[len(shown) - 1 :]
        own = {i: widths[i] for i in shown}
        while _total([*own.values()]) > width and (wide := [i for i in shown if own[i] > least[i]]):
            own[max(wide, key=own.__getitem__)] -= 1
        lines += [""] if lines else []
        lines += _set(
            [[row[i] for i in shown] for row in rows],
            [*own.values()],
            {at for at, i in enumerate(shown) if i in right},
        )
    return lines


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _set(rows: Sequence[Sequence[str]], widths: Sequence[int], right: Collection[int]) -> list[str]:
    """Return the lines of columns of these widths."""
    lines = []
    for row in rows:
        wrapped = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        for cells in itertools.zip_longest(*wrapped, fillvalue=""):
            set_ = (
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            lines.append("  ".join(set_).rstrip())
    return lines


def _pieces(cell: str) -> list[str]:
    """Return the parts between which a cell may be wrapped: words, folders of a path, names of a dotted one."""
    return re.split(r"(?<=[ :/])|(?<=\.)(?=[A-Za-z_])", cell)


def _wrapped(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for piece in _pieces(cell):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def terminal_width() -> int | None:
    """Return the columns of the terminal, or of $COLUMNS; None where the output goes elsewhere."""
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size((0, 0)).columns or None


def paragraph(text: str, indent: str = "", hanging: str = "", width: int | None = None) -> str:
    """Return a text in lines of `width` characters; None: as wide as the terminal, at most 96."""
    return textwrap.fill(
        text,
        width or min(terminal_width() or _LINE, _LINE),
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


_LINE = 96


def fitted(line: str) -> str:
    """Return a line that is wrapped where it is wider than the terminal, with its indentation."""
    width, text = terminal_width(), line.lstrip()
    if width is None or len(line) <= width:
        return line
    return paragraph(text, line[: len(line) - len(text)], "  ", width)


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


def users_line() -> str:
    """Return where the code outside of torch and of this project stands that runs, as " in model.py, line 12,"."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("torch", "titanplans", "einops"):
            return f" in {os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno},"
        frame = frame.f_back
    return ""


def class_name(instance: object) -> str:
    """Return the name of a class, or of an object's; of a split module's, the one before: "Linear" for a SplitLinear."""
    cls = instance if isinstance(instance, type) else type(instance)
    return getattr(cls, "unsplit_class", cls).__name__
