"""The one error of this package."""

from plans.errors import UserError


class KernelError(UserError):
    """A CPU kernel was asked for something that it does not compute. The message says what would work."""
