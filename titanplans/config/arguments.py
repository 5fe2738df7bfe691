"""Parse the command line `titanplans train JOB.toml [--section.key value ...]`, and print its help."""

import argparse
from itertools import groupby
from typing import get_args

from titanplans.config.options import Field, options_of
from titanplans.config.schema import keys
from titanplans.config.translate import is_known, takes_no_value, unknown, unknown_section
from titanplans.config.values import Natural32, describe, from_text, is_options
from titanplans.errors import ConfigError
from titanplans.text import paragraph, show


def parse_arguments(argv: list[str]) -> tuple[str | None, list[tuple[str, str]], set[str]]:
    """Return the job file, the overrides as pairs of key and value, and the set of the flags "help" and "print" that are
    given.

    The file may also be named by --job.config_file. A value follows its option after a space or an equals sign. For a
    boolean key, `--section.key` alone means true, and `--section.no-key` false. Hyphens may be used for underscores.

    Raises:
        ConfigError: there is a second job file, an option without a value, or a value for an option that takes none.
    """
    paths, options, flags = [], [], set()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("--help", "-h", "--print-config", "--print_config"):
            flags.add("print" if "print" in word else "help")
        elif not word.startswith("--"):
            paths.append(word)
        else:
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            positive = ".".join([*key.split(".")[:-1], key.split(".")[-1].removeprefix("no_")])
            if positive != key and takes_no_value(positive):
                if equals:
                    raise ConfigError(f"{word}: takes no value; write --{positive}={value} instead")
                key, value = positive, "false"
            elif not equals and takes_no_value(key):
                value = words.pop(0) if words and words[0].lower() in ("true", "false", "none") else "true"
            elif not equals and (not words or words[0].startswith("--")):
                missing = f"the value is missing; write --{key} VALUE or --{key}=VALUE"
                raise ConfigError(f"--{name}: {missing if is_known(key) else unknown(key)}")
            elif not equals:
                value = words.pop(0)
            options.append((key, value))
    paths += [value for key, value in options if key == "job.config_file"]
    if len(paths) > 1:
        raise ConfigError(
            f"{paths[1]}: a job has one file, and {paths[0]} is already given; options begin with --"
        )
    options = [(key, value) for key, value in options if key != "job.config_file"]
    return (paths[0] if paths else None), options, flags


def take_max_restarts(argv: list[str]) -> tuple[int, list[str]]:
    """Return N of the launcher's option `--max-restarts N` (default 0), and the command line without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-restarts", "--max_restarts", nargs="?", default="0", const="")
    options, rest = parser.parse_known_args(argv)
    return from_text(options.max_restarts, Natural32, "--max-restarts"), rest


HEAD = """\
usage: titanplans train JOB.toml [--section.key value ...] [--max-restarts N]
                        [--print-config] [--help [SECTION]]

Train the job in JOB.toml; options override it. Under torchrun, every process
is given the same line.

  --section.key value     override one key; --section.key=value is the same
  --section.flag          set a flag to true; --section.no-flag sets it to false
  --max-restarts N        start all ranks again if one fails or is killed, at
                          most N times
  --print-config          print the job as it would run, as TOML, and start
                          nothing
  --help SECTION          print the keys of one section, or one key
"""


def usage(of: str | None = None) -> str:
    """Return the text of `--help`: every section with its keys, types, defaults and documentation.

    Args:
        of: the name of a section, to return only this section with its subsections; or of a key, to return the keys of
            this name.

    Raises:
        ConfigError: there is no such section or key.
    """
    selected = [
        key
        for name, key in keys().items()
        if of is None or of in (name, key.name) or name.startswith(f"{of}.")
    ]
    if of is not None and not selected:
        raise ConfigError(f"--help {of}: {_no_help(of)}")
    blocks = [HEAD] if of is None else []
    for section, group in groupby(selected, key=lambda key: key.section):
        lines = [f"[{section}]"]
        for key in group:
            default = "unset" if key.default is None else show(key.default)
            lines += _entry(f"--{section}.{key.name}  ({describe(key.hint)}; default {default})", key.doc, 2)
            for inner_key in keys_of_tables(key):
                lines += _entry(f"{inner_key.name}  ({describe(inner_key.hint)})", inner_key.doc, 6)
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _no_help(of: str) -> str:
    """Return the sentence that there is no section or key `of`, with the keys whose name contains it."""
    if "." in of:
        return unknown(of)
    similar = [name for name, key in keys().items() if of in key.name]
    return (
        f"no section or key of this name; there is {', '.join(similar)}" if similar else unknown_section(of)
    )


def _entry(key: str, doc: str, indent: int) -> list[str]:
    within = " " * (indent + 4)
    return [paragraph(key, " " * indent, " " * 8), paragraph(doc, within)]


def keys_of_tables(key: Field) -> tuple[Field, ...]:
    """Return the keys of the tables of a key that is a list of tables; () for any other key."""
    of, *_ = (*get_args(key.hint), None)
    return options_of(of) if is_options(of) else ()
