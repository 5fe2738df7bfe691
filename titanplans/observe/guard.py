"""The guard between the observer and the run: a failure of the observer's code is kept, and never ends a run."""

from collections.abc import Callable
from typing import Any


class Guard:
    """Runs the observer's own code. After its first failure nothing more of it is run.

    The step that is observed is never run through a guard: its exceptions, such as running out of memory, are raised.

    Attributes:
        failure: the exception, or None.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `call(*args)`; None if it fails, or a call failed before."""
        if self.failure is not None:
            return None
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001  no failure of the observer may end the run
            self.failure = error
            return None


def reason(failure: Exception) -> str:
    """Return a failure on one line, for a report."""
    first = str(failure).strip().partition("\n")[0]
    return f"the observer failed: {type(failure).__name__}: {first}".removesuffix(": ")
