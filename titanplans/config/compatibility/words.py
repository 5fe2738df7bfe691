"""What every refusal is written with: the options of a group, their defaults, and the rule of an option without effect."""

from typing import Any

from titanplans.config.options import Refusals, get, options_of
from titanplans.errors import either
from titanplans.text import show


def needs(options: Any, switch: str, values: tuple[Any, ...], *names: str) -> Refusals:
    """Refuse options that differ from their default and have no effect unless `switch` has one of `values`."""
    value, choices = get(options, switch), either([show(choice) for choice in values])
    for name in names:
        if value not in values and get(options, name) != default(options, name):
            now = "unset" if value is None else show(value)
            key = type(options).full_name(switch)
            remedy = "enable it" if values == (True,) else f"it is {now}: change it"
            yield name, f"has no effect unless {key} = {choices}; {remedy} or remove this key"


def default(options: Any, name: str) -> Any:
    """Return the default of an option, which for a section of a job is the job's."""
    first, _, rest = name.partition(".")
    value = fields(type(options))[first]
    return get(value, rest) if rest else value


def fields(*groups: Any) -> dict[str, Any]:
    """Return the options of some groups by name, with their defaults."""
    return {field.name: field.default for group in groups for field in options_of(group)}
