"""Return the one-line errors of calls that are refused."""

from collections.abc import Callable
from typing import Any

import pytest

from titanplans.errors import UserError


def refusal(call: Callable[..., Any], *args: Any, kind: type[Exception] = UserError, **kwargs: Any) -> str:
    """Return the message of the error that `call` raises, which is of class `kind` and has one line.

    Raises:
        Failed: the call raises no error, or one of another class.
    """
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def refusal_or_none(
    call: Callable[..., Any], *args: Any, kind: type[Exception] = UserError, **kwargs: Any
) -> str | None:
    """Return the message of the error that `call` raises; None if it raises none.

    Ranks use this: they have to return an error instead of raising it, because other ranks wait for them.
    """
    try:
        call(*args, **kwargs)
    except kind as error:
        return str(error)
    return None
