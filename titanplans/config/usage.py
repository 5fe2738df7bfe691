"""The text of `--help` and the tables of docs/generated/options.md, made from the schema and the tables of old keys."""

import itertools
import textwrap
from typing import Any, get_args, get_origin

from titanplans.config.options import Field, options_of
from titanplans.config.other_names import REFUSED, RENAMED, REQUIRES_SWITCH
from titanplans.config.schema import Key, keys
from titanplans.config.translate import unknown, unknown_section
from titanplans.config.values import describe, in_toml, is_options, without_none_type
from titanplans.errors import ConfigError
from titanplans.text import show

HEAD = """\
usage: titanplans train JOB.toml [--section.key value ...] [--max-restarts N] [--print-config] [--help [SECTION]]

Train the job in JOB.toml; options override it. Under torchrun, every process is given the same line.

  --section.key value     override one key; --section.key=value is the same
  --section.flag          true; --section.no-flag is false
  --max-restarts N        start all ranks again, N times at most, where one fails or is killed
  --print-config          print the job as it would run, as TOML, and start nothing
  --help SECTION          the keys of one section, or one key
"""


def usage(of: str | None = None) -> str:
    """Return the text of `--help`: every section with its keys, types, defaults and documentation.

    Args:
        of: only this section with those in it, or only this key, in whichever sections.

    Raises:
        ConfigError: there is no such section and no such key.
    """
    asked = [
        key
        for name, key in keys().items()
        if of is None or of in (name, key.name) or name.startswith(f"{of}.")
    ]
    if not asked:
        assert of is not None
        raise ConfigError(f"--help {of}: {unknown(of) if '.' in of else unknown_section(of)}")
    blocks = [HEAD] if of is None else []
    for section, group in itertools.groupby(asked, key=lambda key: key.section):
        lines = [f"[{section}]"]
        for key in group:
            lines.append(
                f"  --{section}.{key.name}  ({describe(in_toml(key.hint))}; default {_default(key.default)})"
            )
            lines.append(textwrap.fill(key.doc, 100, initial_indent=" " * 6, subsequent_indent=" " * 6))
            for own in _keys_of_tables(key):
                lines.append(f"      {own.name}  ({describe(in_toml(without_none_type(own.hint)))})")
                lines.append(textwrap.fill(own.doc, 100, initial_indent=" " * 10, subsequent_indent=" " * 10))
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def tables() -> str:
    """Return the tables of docs/generated/options.md, as Markdown."""
    return "\n".join(
        [
            "## Every key\n",
            _key_tables(),
            "## Other names\n",
            _renamed_table(),
            "## Keys that do nothing without another\n",
            _switch_table(),
            "## Refused keys\n",
            _refused_table(),
        ]
    )


def _key_tables() -> str:
    blocks = []
    for section, group in itertools.groupby(keys().values(), key=lambda key: key.section):
        found = list(group)
        rows = [f"| `{key.name}` | {_default_cell(key)} | {_cell(key.doc)} |" for key in found]
        blocks.append("\n".join([f"### [{section}]", "", "| key | default | |", "|---|---|---|", *rows]))
        for key in found:
            if own := [f"| `{field.name}` | {_cell(field.doc)} |" for field in _keys_of_tables(key)]:
                head = f"#### [[{section}.{key.name}]]"
                blocks.append("\n".join([head, "", "| key | |", "|---|---|", *own]))
    return "\n\n".join(blocks) + "\n"


def _renamed_table() -> str:
    rows = [f"| `{old}` | {new.of} | `{new.to}` |" for old, new in RENAMED.items()]
    return "\n".join(["| key | known from | read as |", "|---|---|---|", *rows]) + "\n"


def _switch_table() -> str:
    rows = []
    for switch, group in itertools.groupby(REQUIRES_SWITCH.items(), key=lambda item: item[1]):
        rows.append(f"| {', '.join(f'`{key}`' for key, _ in group)} | `{switch}` |")
    return "\n".join(["| key | accepted, with a note, without |", "|---|---|", *rows]) + "\n"


def _refused_table() -> str:
    rows = []
    for reason, group in itertools.groupby(REFUSED.items(), key=lambda item: item[1].reason):
        names = [f"`{key}`" + (f" ({_off(refused.off)})" if refused.off else "") for key, refused in group]
        rows.append(f"| {', '.join(names)} | {_cell(reason)} |")
    return "\n".join(["| key (accepted as) | why, and what instead |", "|---|---|", *rows]) + "\n"


def _keys_of_tables(key: Key) -> tuple[Field, ...]:
    """Return the keys of each table of a key that is a list of tables; none for another."""
    of = get_args(key.hint)[0] if get_origin(key.hint) is tuple else None
    return options_of(of) if is_options(of) else ()


def _default(value: Any) -> str:
    return "unset" if value is None else show(value)


def _default_cell(key: Key) -> str:
    return "unset" if key.default is None else f"`{show(key.default)}`"


def _off(values: tuple[Any, ...]) -> str:
    return " or ".join(f"`{show(value)}`" for value in values)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
