"""Objects of the user's own, by "module:attribute"; what goes wrong in their module is told in one line."""

import importlib
import traceback
from typing import Any

from plans.errors import UserError
from training.verify.errors import VerifyError

# What a module can raise while it is imported; anything else is a traceback's matter.
_FAILS = (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError, OSError)


def load_attribute(name: str, option: str) -> Any:
    """Return what `name`, "module:attribute", stands for.

    Args:
        name: the module as Python imports it, from the current directory too.
        option: where the name was given, for the message.

    Raises:
        VerifyError: there is no such module or attribute, or the module fails.
        UserError: of the module itself, such as a plan registered twice.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise VerifyError(f"{option} {name}: write module:attribute, such as my_package.plans:MyPlan")
    module = import_module(module_name, f"{option} {name}")
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise VerifyError(
            f"{option} {name}: module {module_name} has no {attribute}; it has {', '.join(public) or 'nothing'}"
        )
    return getattr(module, attribute)


def import_module(module_name: str, named: str) -> Any:
    """Import a module; errors as in `load_attribute`, beginning with `named`."""
    try:
        return importlib.import_module(module_name)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise VerifyError(
            f"{named}: no module named {error.name}; run in its folder, install its package, or set PYTHONPATH"
        ) from error
    except _FAILS as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        where = traceback.extract_tb(error.__traceback__)[-1]
        # A SyntaxError's message names the file and the line itself.
        place = "" if isinstance(error, SyntaxError) else f" ({where.filename}, line {where.lineno})"
        raise VerifyError(f"{named}: {module_name} can't be imported: {what}{place}") from error
