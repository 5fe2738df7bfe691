"""Errors whose message is for the person who wrote the job, not for a debugger.

Every refusal in this project is one of these: a sentence that names the key, the value, the
reason and what would work. `train.py` prints it on one line and exits with status 2; nothing
else (a bug, a full disk) is caught on the way.
"""


class UserError(ValueError):
    """What was asked for can't be honoured. The message names the value, the reason and the remedy."""


class PlanError(UserError):
    """A plan does not fit its model, its mesh or its options."""
