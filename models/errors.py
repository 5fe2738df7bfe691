"""The error of this package: a model that was asked for and can't be had, or can't be initialised."""

from plans.errors import UserError


class ModelError(UserError):
    """A model name, flavor, config or state that does not hold. One line, with the remedy."""
