"""Paths in options: `~` and $NAME are expanded where an option is read, once, for every option that is a path."""

import os
import re
from typing import Annotated

from titanplans.config.values import Mismatch, Rule

_UNKNOWN = re.compile(r"\$(\w+|\{)")


def expanded(text: str) -> str:
    """Return a path with `~`, `~user`, $NAME and ${NAME} replaced.

    Raises:
        Mismatch: it is empty, or there is no such user or variable.
    """
    path = os.path.expanduser(os.path.expandvars(text))
    if not path.strip():
        raise Mismatch("expected a path, not nothing; leave the key out for its default")
    if path.startswith("~"):
        raise Mismatch(f"there is no user {path.split('/')[0]} here; ./~ is a folder of that name")
    if unknown := _UNKNOWN.search(path):
        raise Mismatch(f"{unknown.group()} is no variable of the environment; set it, or write the path out")
    return path


FilePath = Annotated[str, Rule("a path", bool, expanded)]
"""A file or a folder that is read or written. Relative ones start where the command does."""
