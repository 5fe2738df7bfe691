"""What a proof can't be asked for: one line, with the option, the value and the remedy."""

from plans.errors import UserError


class VerifyError(UserError):
    """A command line that can't be proved as written, or not on this machine."""
