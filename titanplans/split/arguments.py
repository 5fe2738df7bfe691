"""The positional arguments of a module's forward."""

import inspect

from torch import nn


def positional(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that the forward of `module` takes by position, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
