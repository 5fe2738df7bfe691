"""Turns whatever a library raises for a user's file into an error of one line.

Readers of Arrow, pickles and tokenizers raise anything: TypeError, KeyError, a bare Exception.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from titanplans.errors import DataError, UserError


@contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Turn an exception of a library in the body into a DataError: `what`, its reason, and the remedy.

    Raises:
        UserError: the body's own, unchanged, also where the library has raised another from it; otherwise a DataError.
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
        said = cause.strerror if isinstance(cause, OSError) else None
        reason = said or " ".join(f"{type(cause).__name__}: {cause}".split())
        raise DataError(f"{what} ({reason}); {remedy}") from raised
