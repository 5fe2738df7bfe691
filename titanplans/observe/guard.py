"""What separates the observer from what it observes: a failure of its own code is kept, and never ends a run."""

from collections.abc import Callable
from typing import Any


class Guard:
    """Runs the observer's own code. After its first failure nothing more of it is run.

    The step that is observed is never run through a guard: what that raises, such as running out of memory, is raised.

    Attributes:
        failure: the exception, or None.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what `call(*args)` returns; None if it fails, or something failed before."""
        if self.failure is not None:
            return None
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001  whatever it is, it must not end the run
            self.failure = error
            return None


def reason(failure: Exception) -> str:
    """Return a failure on one line, for a report."""
    first = str(failure).strip().partition("\n")[0]
    return f"the observer failed: {type(failure).__name__}: {first}".removesuffix(": ")
