"""Generates docs/generated/options.md: all keys of a job, and the keys of other projects that are renamed or refused.

python docs/generate.py options.md
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from titanplans.config.arguments import keys_of_tables
from titanplans.config.options import Field
from titanplans.config.other_names import REFUSED, RENAMED, REQUIRES_SWITCH
from titanplans.config.schema import keys
from titanplans.text import show

HEAD = """# Options

All keys of a job. `titanplans train --help` prints the same list, and `--help SECTION` prints one section. How to write a
job is in [config.md](../config.md).

"""


def page() -> str:
    """Return the page."""
    parts = ["## Every key"]
    for section, group in groupby(keys().values(), key=lambda key: key.section):
        found = list(group)
        cells = [(f"`{key.name}`", _default(key), key.doc) for key in found]
        parts.append(f"### [{section}]\n\n" + _table(("key", "default", ""), cells))
        for key in found:
            if own := [(f"`{field.name}`", field.doc) for field in keys_of_tables(key)]:
                parts.append(f"#### [[{section}.{key.name}]]\n\n" + _table(("key", ""), own))
    renamed = [(f"`{old}`", new.of, f"`{new.to}`") for old, new in RENAMED.items()]
    switches = [
        (", ".join(f"`{key}`" for key, _ in group), f"`{switch}`")
        for switch, group in groupby(REQUIRES_SWITCH.items(), key=lambda item: item[1])
    ]
    refused = [
        (", ".join(f"`{key}`" + _off(row.off) for key, row in group), reason)
        for reason, group in groupby(REFUSED.items(), key=lambda item: item[1].reason)
    ]
    parts += ["## Other names", _table(("key", "known from", "key here"), renamed)]
    parts += [
        "## Keys that do nothing without another",
        _table(("key (without the key on the right it is accepted, ignored and logged)", "needs"), switches),
    ]
    parts += [
        "## Refused keys",
        _table(("key (values that are accepted)", "why, and what to do instead"), refused),
    ]
    return HEAD + "\n\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in [head, *cells]]
    return "\n".join([lines[0].replace("|  |", "| |"), "|" + "---|" * len(head), *lines[1:]])


def _default(key: Field) -> str:
    return "unset" if key.default is None else f"`{show(key.default)}`"


def _off(values: tuple[Any, ...]) -> str:
    return f" ({' or '.join(f'`{show(value)}`' for value in values)})" if values else ""
