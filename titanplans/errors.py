"""Errors whose message is for the person who wrote the job, not for a debugger.

Every refusal in this project is one of these: a sentence that names the key, the value, the
reason and what would work. The command line prints it on one line and exits with status 2; nothing
else (a bug, a full disk) is caught on the way.
"""

import difflib
from collections.abc import Collection, Sequence
from typing import Any

from titanplans.text import class_name, show


class UserError(ValueError):
    """What was asked for can't be honoured. The message names the value, the reason and the remedy."""


class PlanError(UserError):
    """A plan does not fit its model, its mesh or its options.

    Args:
        reason: the fault, and the remedy.
        key: the plan key at fault, if there is one.
        style: what the plan has there.
        module: what the model has there.
    """

    def __init__(self, reason: str, *, key: str | None = None, style: object = None, module: object = None):
        self.reason, self.key = reason, key
        where = f"plan key '{key}' ({class_name(style)} on {class_name(module)}): "
        super().__init__(reason if key is None else where + reason)


class ParallelError(UserError):
    """A parallelism that was asked for is not possible, or not together with another one."""


class ConfigError(UserError):
    """A job that can't be run as written: its TOML, a key, a value, or options that contradict each other."""


class OptionError(ConfigError, ParallelError):
    """An option can't have this value, or not together with another one.

    Attributes:
        option: its name, with the group's where it is in one: "fsdp_towers", "compile.mode".
        value: the given value.
        why: the reason and the remedy.
        where: the file and the line that the value is from, if it is from a file: "job.toml, line 3".
    """

    def __init__(self, option: str, value: Any, why: str, where: str = ""):
        super().__init__(option, value, why, where)
        self.option, self.value, self.why, self.where = option, value, why, where

    def __str__(self) -> str:
        return f"{self.where}{': ' * bool(self.where)}{self.option} = {show(self.value)}: {self.why}"

    def renamed(self, option: str) -> "OptionError":
        """Return the same error by another name of the option: a job's dotted key."""
        return OptionError(option, self.value, self.why, self.where)


class ModelError(UserError):
    """A model name, flavor, config or state that does not hold."""


class KernelError(UserError):
    """A CPU kernel was asked for something that it does not compute."""


class DataError(UserError):
    """A data set or tokenizer can't be used."""


class VerifyError(UserError):
    """A command line that can't be proved as written, or not on this machine."""


class RunError(RuntimeError):
    """A run that was right as written can't go on. One line gives the reason and the files that remain."""


class Diverged(RunError):
    """A run has lost its numbers: a loss that is not finite."""


class NotSaved(RunError):
    """A checkpoint, metrics or the log can't be written: the disk is full, for one."""


def either(values: Sequence[object]) -> str:
    """Return what would work as words: "1", "1 or 2", "1, 2 or 4"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(name: str, names: Collection[str], likeness: float = 0.6) -> str | None:
    """Return which of `names` looks most like `name`, in whichever case; None where none does (difflib's ratio)."""
    word, folded = name.casefold(), {other.casefold(): other for other in names}
    alike = difflib.get_close_matches(word, folded, cutoff=likeness)
    # Of those that are equally near, one with the same letters: two are often exchanged.
    return folded[min(alike, key=lambda other: sorted(other) != sorted(word))] if alike else None


def did_you_mean(name: str, names: Collection[str], otherwise: str | None = None) -> str:
    """Return "did you mean gla?" with the nearest of `names`; where none is near `otherwise`, or all of them."""
    meant = nearest(name, names)
    return f"did you mean {meant}?" if meant else otherwise or f"there are {', '.join(names)}"


def near_multiples(value: int, step: int) -> str:
    """Return the multiples of `step` on both sides of `value`, without 0, as words."""
    below = value // step * step
    return either([below, below + step] if below else [step])


_LONGEST_LINE = 2000


def as_line(text: str) -> str:
    """Return a message as it is printed: on one line, with escapes for what can't be seen, and cut in its middle if huge."""
    line = "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in " ".join(text.split())
    )
    if len(line) <= _LONGEST_LINE:
        return line
    half = _LONGEST_LINE // 2
    return f"{line[:half]} ... ({len(line):,} characters) ... {line[-half:]}"
