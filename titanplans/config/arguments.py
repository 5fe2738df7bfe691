"""The command line `titanplans train JOB.toml [--section.key value ...] [--print-config] [--help]`, read by key."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from titanplans.config.values import Natural32, from_text
from titanplans.errors import ConfigError


class Arguments(NamedTuple):
    """A command line, split but not read: options are `(key, word)` in their order, the word None if it is missing."""

    path: str | None
    options: list[tuple[str, str | None]]
    print_config: bool
    help: bool


def parse_arguments(argv: list[str], takes_no_value: Callable[[str], bool]) -> Arguments:
    """Split `argv` into the job file and its overrides.

    A value follows its option or an equals sign. Where `takes_no_value(key)`, `--section.key` alone
    is true and `--section.no-key` false. The file may also be given as --job.config_file, and
    hyphens for underscores.

    Raises:
        ConfigError: a second job file, or a value for an option that takes none.
    """
    path, options, print_config, show_help = None, [], False, False
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            show_help = True
        elif word in ("--print-config", "--print_config"):
            print_config = True
        elif not word.startswith("--"):
            path = _only(path, word)
        else:
            name, equals, value = word[2:].partition("=")
            key, negated = _key(name, takes_no_value)
            if negated and equals:
                raise ConfigError(f"{word}: takes no value; write --{key}={value} instead")
            if negated:
                value = "false"
            elif not equals and takes_no_value(key):
                value = words.pop(0) if words and words[0].lower() in ("true", "false", "none") else "true"
            elif not equals:
                value = words.pop(0) if words and not words[0].startswith("--") else None
            if key == "job.config_file" and value is not None:
                path = _only(path, value)
            else:
                options.append((key, value))
    return Arguments(path, options, print_config, show_help)


def take_max_restarts(argv: list[str]) -> tuple[int, list[str]]:
    """Take `--max-restarts N`, an option of the launcher and none of the job's, out of a command line; 0 without it.

    Raises:
        ConfigError: it has no number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-restarts", "--max_restarts", nargs="?", default="0", const="")
    found, rest = parser.parse_known_args(argv)
    return from_text(found.max_restarts, Natural32, "--max-restarts"), rest


def _key(name: str, takes_no_value: Callable[[str], bool]) -> tuple[str, bool]:
    """Return the key that an option names, and whether it is negated: "x.no-flag" is ("x.flag", True)."""
    key = name.replace("-", "_")
    section, _, last = key.rpartition(".")
    positive = f"{section}.{last.removeprefix('no_')}"
    if last.startswith("no_") and not takes_no_value(key) and takes_no_value(positive):
        return positive, True
    if key.startswith("no_") and takes_no_value(key.removeprefix("no_")):
        section, _, last = key.removeprefix("no_").rpartition(".")
        raise ConfigError(f"--{name}: no such option; false is --{section}.no-{last}")
    return key, False


def _only(path: str | None, another: str) -> str:
    if path is not None:
        raise ConfigError(
            f"{another}: a job has one file, and {path} is already given; options begin with --"
        )
    return another
