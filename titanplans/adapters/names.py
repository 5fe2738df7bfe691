"""The modules and parameters that an option names, by names and patterns; one that matches none is an error."""

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase

from titanplans.errors import UserError

Refusal = Callable[[str], UserError]
"""Makes the error of an option from the reason."""


def matches(word: str, name: str) -> bool:
    """Whether `word` is a dotted suffix of `name`, or a pattern that matches all of it."""
    if any(sign in word for sign in "*?["):
        return fnmatchcase(name, word)
    return name == word or name.endswith(f".{word}")


def end_of(name: str) -> str:
    """Return a name from its last part that is no number: "gk_proj.0"."""
    parts = name.split(".")
    words = [at for at, part in enumerate(parts) if not part.isdigit()]
    return ".".join(parts[words[-1] :]) if words else name


def select(words: Collection[str], names: Collection[str], refuse: Refusal, what: str) -> list[str]:
    """Return those of `names` that some word matches, in order.

    Args:
        words: of the option.
        names: what there is.
        refuse: makes the error.
        what: their kind, in the singular: "Linear module".

    Raises:
        UserError: a word matches none.
    """
    for word in words:
        if not word or not any(matches(word, name) for name in names):
            ends = list(dict.fromkeys(map(end_of, names)))
            raise refuse(f"{word!r} matches no {what}; there are {', '.join(ends) or 'none'}")
    return [name for name in names if any(matches(word, name) for word in words)]
