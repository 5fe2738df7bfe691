"""What every refusal is written with: an option and a reason, and the rule of an option that does nothing."""

from collections.abc import Iterable
from typing import Any

from titanplans.config.options import Refusals, options_of
from titanplans.errors import either
from titanplans.text import show


def needs(options: Any, switch: str, values: Iterable[Any], *names: str) -> Refusals:
    """Refuse another value than their default of options that do nothing unless `switch` has one of `values`."""
    value, choices = get(options, switch), either([show(choice) for choice in values])
    for name in names:
        if value not in values and get(options, name) != default(options, name):
            now = "unset" if value is None else show(value)
            yield name, f"has no effect with {switch} = {now}: set it to {choices}, or remove this key"


def get(options: Any, name: str) -> Any:
    """Return the value of an option; "compile.mode" is one of a nested group."""
    for part in name.split("."):
        options = getattr(options, part)
    return options


def default(options: Any, name: str) -> Any:
    """Return the default of an option, which for a section of a job is the job's."""
    first, _, rest = name.partition(".")
    value = fields(type(options))[first]
    return get(value, rest) if rest else value


def fields(*groups: Any) -> dict[str, Any]:
    """Return the options of some groups by name, with their defaults."""
    return {field.name: field.default for group in groups for field in options_of(group)}
