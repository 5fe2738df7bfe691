"""Import and call the user's code, such as plans, and report a mistake in it by one message that names the line of code.

A traceback through this package would hide this line.
"""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from titanplans.errors import PlanError, UserError, did_you_mean

_TORCH = importlib.util.find_spec("torch")  # locates torch without importing it
_FOLDERS = _TORCH.submodule_search_locations if _TORCH else None
_NOT_USERS = (*(f"{folder}/" for folder in (*(_FOLDERS or ()), Path(__file__).parent)), "<frozen")
"""Prefixes of the names of files that are not the user's: files of torch, of this package and of frozen modules."""


@contextmanager
def as_user_error(what: str, error: type[UserError] = PlanError) -> Iterator[None]:
    """Turn an exception of the body into a `UserError` of one line.

    Args:
        what: how the message begins; it ends with the user's file and line, if there is one.
        error: the class to raise.

    Raises:
        UserError: a UserError of the body, unchanged; for any other exception, an `error`.
    """
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt):  # the last two are no fault of the user's code
        raise
    except BaseException as cause:
        message = " ".join(str(cause).split())
        raise error(f"{what}: {type(cause).__name__}: {message}{_location(cause)}") from cause


def import_module(module_name: str, what: str, error: type[UserError] = PlanError) -> ModuleType:
    """Import a module of the user.

    Args:
        module_name: its dotted name.
        what: how the message begins: the option or argument that names the module.
        error: the class to raise.

    Raises:
        UserError: an `error`, if there is no such module or it fails; or a UserError that the module itself raises, e.g.
            for a plan that is registered twice.
    """
    try:
        with as_user_error(f"{what}: {module_name} can't be imported", error):
            return importlib.import_module(module_name)
    except error as failure:
        cause = failure.__cause__
        # The module itself is missing, and not one that it imports.
        if isinstance(cause, ModuleNotFoundError) and f"{module_name}.".startswith(f"{cause.name}."):
            raise error(_no_module(what, cause.name)) from cause
        raise


def check_package(name: str, what: str, error: type[UserError] = PlanError) -> None:
    """Refuse "package.module:attribute" if the package is not installed, without importing it.

    Raises:
        UserError: an `error`.
    """
    package = name.partition(":")[0].partition(".")[0]
    if package.isidentifier() and package not in sys.modules and importlib.util.find_spec(package) is None:
        raise error(_no_module(what, package))


def _no_module(what: str, name: str | None) -> str:
    return f"{what}: no module named '{name}'; run in its folder, install its package, or set PYTHONPATH"


def load_attribute(
    name: str,
    what: str,
    error: type[UserError] = PlanError,
    fits: Callable[[Any], bool] = lambda value: True,
) -> Any:
    """Import a module of the user and return one of its attributes.

    Args:
        name: "module:attribute"; the module may be in the current directory.
        what: how the message begins: the option or argument that has the name.
        error: the class to raise.
        fits: returns whether a value of the module could be the one that the user meant; for the suggestion in the
            message.

    Raises:
        UserError: as `import_module`, or an `error` if there is no such attribute.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise error(f"{what}: write module:attribute, such as my_package.plans:MyPlan")
    module = import_module(module_name, what, error)
    if hasattr(module, attribute):
        return getattr(module, attribute)
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    names = [key for key, value in public.items() if not isinstance(value, ModuleType) and fits(value)]
    remedy = did_you_mean(attribute, names, f"it has {', '.join(names) or 'nothing'}")
    location = getattr(module, "__file__", None) or "built in"
    raise error(f"{what}: module {module_name} has no {attribute}; {remedy} ({location})")


def check_keywords(cls: type, arguments: Mapping[str, Any], what: str, error: type[UserError]) -> None:
    """Refuse keyword arguments that the constructor of a user's class does not take.

    Raises:
        UserError: an `error` that names the nearest keyword, or all of them, and the line of the constructor.
    """
    signature = inspect.signature(cls)
    try:
        signature.bind(**arguments)
    except TypeError as mismatch:
        keywords = list(signature.parameters)
        unexpected = next((key for key in arguments if key not in keywords), "")
        remedy = did_you_mean(unexpected, keywords, f"it takes {', '.join(keywords) or 'none'}")
        code = getattr(cls.__init__, "__code__", None)
        location = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        raise error(f"{what}: TypeError: {mismatch}; {remedy}{location}") from mismatch


def _location(error: BaseException) -> str:
    """Return the user's innermost line in a traceback as " (file, line 3)"; "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    # A SyntaxError's message names its line itself.
    if isinstance(error, SyntaxError) or not frames:
        return ""
    # The user's files are in the folder of the first one. Later frames may be of a library that they call.
    folder = Path(frames[0].filename).parent
    frame = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)][-1]
    return f" ({frame.filename}, line {frame.lineno})"


def _is_users(file: str) -> bool:
    is_stdlib = file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file
    return not (is_stdlib or file.startswith(_NOT_USERS))
