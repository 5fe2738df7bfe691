"""Code of the user's own: a mistake in it becomes an error of one line that names the line of code.

A plan's module, its class and its methods are somebody's work in progress, and a traceback through this package would
hide the line that matters.
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

_TORCH = importlib.util.find_spec("torch")  # found without importing it
_FOLDERS = _TORCH.submodule_search_locations if _TORCH else None
_NOT_THEIRS = (*(f"{folder}/" for folder in (*(_FOLDERS or ()), Path(__file__).parent)), "<frozen")


@contextmanager
def as_user_error(what: str, error: type[UserError] = PlanError) -> Iterator[None]:
    """Turn what code in the body raises into an `error`: it begins with `what` and ends with the file and line, if known.

    Raises:
        UserError: unchanged, if the body raised one; otherwise `error`.
    """
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt):  # the last two are not theirs
        raise
    except BaseException as raised:
        message = " ".join(str(raised).split())
        raise error(f"{what}: {type(raised).__name__}: {message}{_place(raised)}") from raised


def import_module(module_name: str, what: str, error: type[UserError] = PlanError) -> ModuleType:
    """Import a module of the user's.

    Args:
        module_name: dotted.
        what: the beginning of the message: who named the module, and where.
        error: the class to raise.

    Raises:
        UserError: of the class `error` if there is no such module or it fails; or the module's own, such as for a plan
            that is registered twice.
    """
    try:
        with as_user_error(f"{what}: {module_name} can't be imported", error):
            return importlib.import_module(module_name)
    except error as failed:
        missing = failed.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing.name}."):
            raise error(_no_module(what, missing.name)) from missing
        raise


def check_package(name: str, what: str, error: type[UserError] = PlanError) -> None:
    """Refuse "package.module:attribute" whose package is not installed; nothing is imported.

    Raises:
        UserError: of the class `error`.
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
    """Return the attribute of a module of the user's that `name` gives as "module:attribute".

    Args:
        name: the module as Python imports it, also from the current directory, and the attribute.
        what: the beginning of the message: who gave the name, and where.
        error: the class to raise.
        fits: which of the module's values would do; the nearest is named.

    Raises:
        UserError: as `import_module`, or there is no such attribute.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise error(f"{what}: write module:attribute, such as my_package.plans:MyPlan")
    module = import_module(module_name, what, error)
    if hasattr(module, attribute):
        return getattr(module, attribute)
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    there = [key for key, value in public.items() if not isinstance(value, ModuleType) and fits(value)]
    remedy = did_you_mean(attribute, there, f"it has {', '.join(there) or 'nothing'}")
    place = getattr(module, "__file__", None) or "built in"
    raise error(f"{what}: module {module_name} has no {attribute}; {remedy} ({place})")


def check_keywords(cls: type, arguments: Mapping[str, Any], what: str, error: type[UserError]) -> None:
    """Refuse keywords that the constructor of a class of the user's does not take.

    Raises:
        UserError: of the class `error`: with the nearest keyword, or all, and the line of the constructor.
    """
    signature = inspect.signature(cls)
    try:
        signature.bind(**arguments)
    except TypeError as mistaken:
        known = list(signature.parameters)
        stray = next((key for key in arguments if key not in known), "")
        remedy = did_you_mean(stray, known, f"it takes {', '.join(known) or 'none'}")
        code = getattr(cls.__init__, "__code__", None)
        place = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        raise error(f"{what}: TypeError: {mistaken}; {remedy}{place}") from mistaken


def _place(error: BaseException) -> str:
    """Return the user's innermost line, if there is one; a SyntaxError's message names its line itself.

    Theirs are the files in the folder of the first one that is not of Python, torch or this package: that file may call a
    library, which then raises.
    """
    files = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    if isinstance(error, SyntaxError) or not files:
        return ""
    folder = Path(files[0].filename).parent
    line = [frame for frame in files if Path(frame.filename).is_relative_to(folder)][-1]
    return f" ({line.filename}, line {line.lineno})"


def _is_theirs(file: str) -> bool:
    python = file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file
    return not (python or file.startswith(_NOT_THEIRS))
