"""What a data set or a tokenizer that can't be used raises."""

from plans.errors import UserError


class DataError(UserError):
    """A data set or tokenizer can't be used. The message names the key, the value and what would work."""
