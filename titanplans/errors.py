"""Errors whose messages are for users, and functions that format parts of the messages.

The command line prints a `UserError` on one line and exits with status 2, or with 1 for a `RunError`. Any other exception is
a bug, and keeps its traceback.
"""

import difflib
from collections.abc import Collection, Sequence
from typing import Any

from titanplans.text import class_name, show


class UserError(ValueError):
    """A request that can't be fulfilled as it is. The message names the value, the reason and the remedy."""


class PlanError(UserError):
    """A plan that does not fit its model, its mesh or its options.

    Args:
        reason: the fault and the remedy.
        key: the plan key at fault, if there is one.
        style: the plan's value for that key.
        module: the model's module for that key.
    """

    def __init__(self, reason: str, *, key: str | None = None, style: object = None, module: object = None):
        self.reason, self.key = reason, key
        where = f"plan key '{key}' ({class_name(style)} on {class_name(module)}): "
        super().__init__(reason if key is None else where + reason)


class ParallelError(UserError):
    """A parallelism that is not possible, or that can't be combined with another one."""


class ConfigError(UserError):
    """A job that can't be run as written: a fault in its TOML, an option or a value, or options that contradict."""


class OptionError(ConfigError, ParallelError):
    """An option that can't have this value, or that can't be combined with another option.

    Attributes:
        option: its name, preceded by the name of its group if it has one: "fsdp_towers", "compile.mode".
        value: the value.
        reason: the reason and the remedy.
        where: the file and line of the value, if it is from a file: "job.toml, line 3".
    """

    def __init__(self, option: str, value: Any, reason: str, where: str = ""):
        super().__init__(option, value, reason, where)
        self.option, self.value, self.reason, self.where = option, value, reason, where

    def __str__(self) -> str:
        return f"{self.where}{': ' * bool(self.where)}{self.option} = {show(self.value)}: {self.reason}"

    def renamed(self, option: str) -> "OptionError":
        """Return the same error with another name for the option, such as a job's dotted key."""
        return OptionError(option, self.value, self.reason, self.where)


class ModelError(UserError):
    """A model name, flavor, config or state dict that can't be used."""


class KernelError(UserError):
    """A CPU kernel that does not support its arguments."""


class DataError(UserError):
    """A data set or tokenizer that can't be used."""


class VerifyError(UserError):
    """A proof that can't be run as written, or that this machine can't run."""


class RunError(RuntimeError):
    """A run that can't continue although its job is valid. The message names the reason and the checkpoint that remains."""


class Diverged(RunError):
    """A loss, gradient norm or weight that is not finite."""


class NotSaved(RunError):
    """A checkpoint, metrics or the log can't be written, e.g. because the disk is full."""


def either(values: Sequence[object]) -> str:
    """Join alternatives: "1", "1 or 2", "1, 2 or 4"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(name: str, names: Collection[str], cutoff: float = 0.6) -> str | None:
    """Return the one of `names` that is most similar to `name`, ignoring case; None if no similarity (difflib's ratio)
    reaches `cutoff`."""
    word, by_folded = name.casefold(), {other.casefold(): other for other in names}
    matches = difflib.get_close_matches(word, by_folded, cutoff=cutoff)
    # Prefer a name with the same letters: exchanging two letters is a common typo.
    return by_folded[min(matches, key=lambda other: sorted(other) != sorted(word))] if matches else None


def did_you_mean(name: str, names: Collection[str], otherwise: str | None = None) -> str:
    """Return "did you mean gla?" with the nearest of `names`; if none is near, `otherwise` or a list of all of them."""
    suggestion = nearest(name, names)
    return f"did you mean {suggestion}?" if suggestion else otherwise or f"there are {', '.join(names)}"


def near_multiples(value: int, step: int) -> str:
    """Return the nearest multiples of `step` above 0 on both sides of `value`, in words: "8 or 16"."""
    below = value // step * step
    return either([below, below + step] if below else [step])


_MAX_LINE = 2000


def as_line(text: str) -> str:
    """Return a message on one line, with unprintable characters escaped, and shortened in the middle if it is very long."""
    line = "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in " ".join(text.split())
    )
    if len(line) <= _MAX_LINE:
        return line
    half = _MAX_LINE // 2
    return f"{line[:half]} ... ({len(line):,} characters) ... {line[-half:]}"
