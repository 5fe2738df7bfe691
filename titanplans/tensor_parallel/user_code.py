"""Code of the user's own: what goes wrong in it while it is run is told in one line, with its place.

A plan's module, its class and its methods are somebody's work in progress; a traceback through this
package would hide the line that matters. Errors of the project's own code are not caught here.
"""

import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from titanplans.errors import PlanError, UserError

RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What code can raise by a mistake; what is meant for the process (an interrupt, no memory) is not among them."""

_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen")


@contextmanager
def told_in_one_line(what: str, error: type[UserError] = PlanError) -> Iterator[None]:
    """Run the body, and raise what code in it raises as an `error` that begins with `what` and ends with the place.

    Raises:
        UserError: as it is, if the body raised one; otherwise `error`.
    """
    try:
        yield
    except UserError:
        raise
    except RAISED as raised:
        message = " ".join(str(raised).split())
        raise error(f"{what}: {type(raised).__name__}: {message}{_place(raised)}") from raised


def import_module(module_name: str, what: str, error: type[UserError] = PlanError) -> ModuleType:
    """Import a module of the user's.

    Args:
        module_name: dotted.
        what: who named it and where, the beginning of a message.
        error: the class of an error.

    Raises:
        UserError: of the class `error`: there is no such module, or it fails; or the module's own, such as a plan
            that is registered twice.
    """
    try:
        with told_in_one_line(f"{what}: {module_name} can't be imported", error):
            return importlib.import_module(module_name)
    except error as told:
        if isinstance(told.__cause__, ModuleNotFoundError):
            raise error(
                f"{what}: no module named '{told.__cause__.name}'; run in its folder, install its package, or set PYTHONPATH"
            ) from told.__cause__
        raise


def _place(error: BaseException) -> str:
    """Return the innermost line of the user's, or of anybody; a SyntaxError's message has it already."""
    if isinstance(error, SyntaxError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    where = (theirs or frames)[-1]
    return f" ({where.filename}, line {where.lineno})"
