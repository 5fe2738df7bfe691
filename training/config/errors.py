"""What a job's author did that can't be read or honoured: one line, with the key, the value and the remedy."""

from plans.errors import UserError


class ConfigError(UserError):
    """A job that can't be run as written: its TOML, a key, a value, or options that contradict each other."""
