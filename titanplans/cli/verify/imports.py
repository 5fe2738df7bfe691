"""Objects of the user's own, by "module:attribute"; what goes wrong in their module is told in one line."""

from typing import Any

from titanplans.errors import VerifyError
from titanplans.tensor_parallel.user_code import import_module


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
    module = import_module(module_name, f"{option} {name}", VerifyError)
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise VerifyError(
            f"{option} {name}: module {module_name} has no {attribute}; it has {', '.join(public) or 'nothing'}"
        )
    return getattr(module, attribute)
