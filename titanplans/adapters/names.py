"""Names and patterns of options, matched against names of modules and parameters. Start at `select`."""

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase

from titanplans.errors import UserError

Refusal = Callable[[str], UserError]
"""Makes the error of an option from the reason."""


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` is a dotted suffix of `name` ("attn.q_proj"), or a wildcard for the full name ("*.q_proj")."""
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


def end_of(name: str) -> str:
    """Return the end of a dotted name, beginning with its last component that is not an index, for example "gk_proj.0"."""
    components = name.split(".")
    words = [index for index, component in enumerate(components) if not component.isdigit()]
    return ".".join(components[words[-1] :]) if words else name


def select(patterns: Collection[str], names: Collection[str], refuse: Refusal, what: str) -> list[str]:
    """Return the `names` that at least one pattern matches, in their order.

    Args:
        patterns: as in `matches`.
        names: the names to choose from.
        refuse: makes the error.
        what: the kind of the names, in the singular, for the error: "Linear module".

    Raises:
        UserError: a pattern is empty or matches no name.
    """
    for pattern in patterns:
        if not pattern or not any(matches(pattern, name) for name in names):
            ends = list(dict.fromkeys(map(end_of, names)))
            raise refuse(f"{pattern!r} matches no {what}; there are {', '.join(ends) or 'none'}")
    return [name for name in names if any(matches(pattern, name) for pattern in patterns)]
