"""Format what commands and logs print: values, tables, wrapped lines, lists of names, counts, bytes."""

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
    """Format a value on one line, in TOML's notation: true, not True."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(show, value)) + "]"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{show(key)} = {show(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, int) and value.bit_length() > 64:
        text = f"{value:#x}"  # Python refuses to write thousands of decimal digits
    elif isinstance(value, type):
        text = value.__qualname__
    else:
        has_fields = dataclasses.is_dataclass(value) or hasattr(type(value), "model_fields")
        text = f"{type(value).__name__}(...)" if has_fields else str(value)
    return " ".join(text.split())


def columns(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int | None = None
) -> list[str]:
    """Format a table as lines.

    If the table is wider than `width`, cells are wrapped between words, beginning with the widest column. Columns that
    still do not fit follow below, next to a repeated first column.

    Args:
        rows: the cells of each row.
        right: indices of right-aligned columns.
        width: the maximum width; None: the terminal's, or no maximum if the output is not a terminal.
    """
    width = width or terminal_width()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is None or _table_width(widths) <= width:
        return _format_rows(rows, widths, right)
    min_widths = [
        max(len(word.rstrip()) for cell in column for word in _split_words(cell))
        for column in zip(*rows, strict=True)
    ]
    lines, remaining = list[str](), list(range(1, len(widths)))
    while remaining or not lines:
        # Show the first column, and as many of the remaining ones as fit at their minimum widths, at least one.
        shown = [0, *remaining[:1]]
        while (
            len(shown) <= len(remaining)
            and _table_width([min_widths[i] for i in [*shown, remaining[len(shown) - 1]]]) <= width
        ):
            shown.append(remaining[len(shown) - 1])
        remaining = remaining[len(shown) - 1 :]
        shown_widths = {i: widths[i] for i in shown}
        while _table_width([*shown_widths.values()]) > width and (
            shrinkable := [i for i in shown if shown_widths[i] > min_widths[i]]
        ):
            shown_widths[max(shrinkable, key=shown_widths.__getitem__)] -= 1
        lines += [""] if lines else []
        lines += _format_rows(
            [[row[i] for i in shown] for row in rows],
            [*shown_widths.values()],
            {index for index, i in enumerate(shown) if i in right},
        )
    return lines


def _table_width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _format_rows(rows: Sequence[Sequence[str]], widths: Sequence[int], right: Collection[int]) -> list[str]:
    lines = []
    for row in rows:
        wrapped = [_wrap_cell(cell, width) for cell, width in zip(row, widths, strict=True)]
        for cells in itertools.zip_longest(*wrapped, fillvalue=""):
            aligned = (
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            lines.append("  ".join(aligned).rstrip())
    return lines


def _split_words(cell: str) -> list[str]:
    """Split a cell where it may be wrapped: after words, folders of a path, and names of a dotted name."""
    return re.split(r"(?<=[ :/])|(?<=\.)(?=[A-Za-z_])", cell)


def _wrap_cell(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for word in _split_words(cell):
        if lines[-1] and len(lines[-1] + word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def terminal_width() -> int | None:
    """Return the width of the terminal, or $COLUMNS; None if the output is not a terminal."""
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size((0, 0)).columns or None


def paragraph(text: str, indent: str = "", hanging: str = "", width: int | None = None) -> str:
    """Wrap a text to lines of `width` characters; None: the terminal's width, at most 96."""
    return textwrap.fill(
        text,
        width or min(terminal_width() or _MAX_WIDTH, _MAX_WIDTH),
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


_MAX_WIDTH = 96


def fitted(line: str) -> str:
    """Wrap a line that is wider than the terminal, and keep its indentation."""
    width, text = terminal_width(), line.lstrip()
    if width is None or len(line) <= width:
        return line
    return paragraph(text, line[: len(line) - len(text)], "  ", width)


def some(names: Sequence[str], most: int = 3) -> str:
    """Join the first names, and count the others: "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: "1 graph", "2 graphs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(size: int) -> str:
    """Format a number of bytes with its unit: "768 B", "65.5 kB"."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def user_line() -> str:
    """Return the innermost line on the stack outside of torch, einops and this package: " in model.py, line 12,"."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("torch", "titanplans", "einops"):
            return f" in {os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno},"
        frame = frame.f_back
    return ""


def class_name(instance: object) -> str:
    """Return the name of a class, or of an object's class; for a split module, of the unsplit class ("Linear")."""
    cls = instance if isinstance(instance, type) else type(instance)
    return getattr(cls, "unsplit_class", cls).__name__
