"""What this package refuses."""

from plans.errors import UserError


class ParallelError(UserError):
    """A parallelism that was asked for can't be had, or not together with another one."""
