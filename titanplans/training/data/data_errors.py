"""Report faults in a user's data files as a `DataError` of one line: `as_data_error` and `expect`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from titanplans.errors import DataError, UserError

T = TypeVar("T")


@contextmanager
def as_data_error(problem: str, remedy: str = "repair the file or leave it out") -> Iterator[None]:
    """Replace an exception that a library raises in the body with a DataError: "problem (reason); remedy".

    A UserError that the body raises is raised unchanged, even if a library has raised another exception from it.

    Raises:
        DataError, UserError: as described above.
    """
    try:
        yield
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # readers of Arrow, pickles and tokenizers raise all kinds, even a bare Exception
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        system_reason = cause.strerror if isinstance(cause, OSError) else None
        reason = system_reason or " ".join(f"{type(cause).__name__}: {cause}".split())
        raise DataError(f"{problem} ({reason}); {remedy}") from error


def expect(value: Any, kind: type[T], where: str, expected: str, remedy: str) -> T:
    """Return `value` if it is of type `kind` and, if a string, can be encoded in UTF-8.

    Args:
        value: a value of a row.
        kind: the required type.
        where: the value's location, for the message.
        expected: the required type in words.
        remedy: the end of the message.

    Raises:
        DataError: the value has another type, or can't be encoded.
    """
    problem = None
    if not isinstance(value, kind):
        problem = "no value" if value is None else f"a value of type {type(value).__name__}"
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            problem = "an unpaired surrogate"
    if problem is not None:
        raise DataError(f"{where} holds {problem} where there should be {expected}; {remedy}")
    return value
