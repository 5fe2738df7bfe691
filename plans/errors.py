"""Errors whose message is for the person who wrote the job, not for a debugger.

Every refusal in this project is one of these: a sentence that names the key, the value, the
reason and what would work. `train.py` prints it on one line and exits with status 2; nothing
else (a bug, a full disk) is caught on the way.
"""

from collections.abc import Sequence


class UserError(ValueError):
    """What was asked for can't be honoured. The message names the value, the reason and the remedy."""


class PlanError(UserError):
    """A plan does not fit its model, its mesh or its options."""


def either(values: Sequence[object]) -> str:
    """Return what would work as words: "1", "1 or 2", "1, 2 or 4"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def near_multiples(value: int, step: int) -> str:
    """Return the multiples of `step` on both sides of `value`, of which 0 does not count, as words."""
    below = value // step * step
    return either([below, below + step] if below else [step])
