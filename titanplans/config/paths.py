"""Paths in options: `~` and $NAME are expanded where an option is read, once, for every option that is a path."""

import os
import re
from typing import Annotated

from pydantic import AfterValidator

from titanplans.config.values import Constraint, Mismatch

_UNKNOWN = re.compile(r"\$(\w+|\{)")


def expanded(text: str) -> str:
    """Return a path with `~`, `~user`, $NAME and ${NAME} replaced.

    Raises:
        Mismatch: it is empty, or there is no such user or variable.
    """
    path = os.path.expanduser(os.path.expandvars(text))
    if not path.strip():
        raise Mismatch("expected a path, found an empty string; remove the key for its default")
    if path.startswith("~"):
        raise Mismatch(f"there is no user {path.split('/')[0]} here; write ./~ for a directory of that name")
    if unknown := _UNKNOWN.search(path):
        raise Mismatch(f"{unknown.group()} is not an environment variable; set it, or write the whole path")
    return path


FilePath = Annotated[str, AfterValidator(expanded), Constraint("a path", bool)]
"""A file or a folder that is read or written. Relative ones start where the command does."""
