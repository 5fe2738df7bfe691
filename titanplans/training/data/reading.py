"""Faults of a user's files, each as an error of one line.

Readers of Arrow, pickles and tokenizers raise anything: TypeError, KeyError, a bare Exception.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from titanplans.errors import DataError, UserError

T = TypeVar("T")


@contextmanager
def refusing(what: str, remedy: str = "repair the file or leave it out") -> Iterator[None]:
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


def expect(value: Any, kind: type[T], where: str, wanted: str, remedy: str) -> T:
    """Return a value of a row, which has to be of a type, and, if it is a text, to have a form in UTF-8.

    Raises:
        DataError: names `where` it is, the type that was found, the one that was `wanted`, and the remedy.
    """
    found = None
    if not isinstance(value, kind):
        found = "no value" if value is None else f"a value of type {type(value).__name__}"
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            found = "an unpaired surrogate"
    if found is not None:
        raise DataError(f"{where} holds {found} where there should be {wanted}; {remedy}")
    return value
