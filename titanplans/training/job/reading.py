"""Turns whatever a library raises for a user's file into an error of one line.

Readers of Arrow, pickles and tokenizers raise anything: TypeError, KeyError, a bare Exception.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanplans.errors import DataError, UserError


@contextmanager
def refusing(what: str, remedy: str, error: type[UserError] = DataError) -> Iterator[None]:
    """Turn an exception of a library in the body into an `error`: `what`, its reason, and the remedy.

    Raises:
        UserError: the body's own, unchanged, also where the library has raised another from it; otherwise `error`.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as raised:
        cause: BaseException = raised
        while cause.__cause__ is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise error(f"{what} ({reason}); {remedy}") from raised


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn an OSError of reading `file` into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{file} can't be read ({error.strerror}); repair the file or leave it out"
        ) from error
