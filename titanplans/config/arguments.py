"""The command line `titanplans train JOB.toml [--section.key value ...] [--print-config] [--help]`, read by key."""

from collections.abc import Callable
from typing import NamedTuple

from titanplans.errors import ConfigError


class Arguments(NamedTuple):
    """What was asked for, unread: options are `(key, word)` in their order, the word None where it is missing."""

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
                raise ConfigError(f"{word}: takes no value; write --{key}={value}")
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
    """Take `--max-restarts N`, an option of the launcher and none of the job's, out of a command line; 0 where it is not.

    Raises:
        ConfigError: it has no number, or another option's value is meant to be it.
    """
    restarts, rest, words = 0, [], list(argv)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name not in ("--max-restarts", "--max_restarts"):
            rest.append(name + equals + value)
            continue
        if not equals:
            value = words.pop(0) if words else ""
        if not (value.isascii() and value.isdecimal() and len(value) <= 9):
            raise ConfigError(f"--max-restarts {value}: expected a number of restarts, 0 or more")
        restarts = int(value)
    return restarts, rest


def _key(name: str, takes_no_value: Callable[[str], bool]) -> tuple[str, bool]:
    """Return the key that an option names, and whether it is negated: "x.no-flag" is ("x.flag", True)."""
    key = name.replace("-", "_")
    section, _, last = key.rpartition(".")
    positive = f"{section}.{last.removeprefix('no_')}"
    if last.startswith("no_") and not takes_no_value(key) and takes_no_value(positive):
        return positive, True
    return key, False


def _only(path: str | None, another: str) -> str:
    if path is not None:
        raise ConfigError(
            f"{another}: a job has one file, and {path} is given already; options begin with --"
        )
    return another
