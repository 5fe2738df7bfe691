"""The text of `--help`, made from the schema."""

import textwrap
from itertools import groupby
from typing import get_args

from titanplans.config.options import Field, options_of
from titanplans.config.schema import keys
from titanplans.config.translate import unknown, unknown_section
from titanplans.config.values import describe, is_options
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

    `of`: only this section with those in it, or only this key, in whichever sections; a ConfigError if there is none.
    """
    asked = [
        key
        for name, key in keys().items()
        if of is None or of in (name, key.name) or name.startswith(f"{of}.")
    ]
    if of is not None and not asked:
        raise ConfigError(f"--help {of}: {unknown(of) if '.' in of else unknown_section(of)}")
    blocks = [HEAD] if of is None else []
    for section, group in groupby(asked, key=lambda key: key.section):
        lines = [f"[{section}]"]
        for key in group:
            default = "unset" if key.default is None else show(key.default)
            lines += _entry(f"--{section}.{key.name}  ({describe(key.hint)}; default {default})", key.doc, 2)
            for own in keys_of_tables(key):
                lines += _entry(f"{own.name}  ({describe(own.hint)})", own.doc, 6)
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _entry(key: str, doc: str, indent: int) -> list[str]:
    return [" " * indent + key, textwrap.indent(textwrap.fill(doc, 96 - indent), " " * (indent + 4))]


def keys_of_tables(key: Field) -> tuple[Field, ...]:
    """Return the keys of each table of a key that is a list of tables; none for another."""
    of, *_ = (*get_args(key.hint), None)
    return options_of(of) if is_options(of) else ()
