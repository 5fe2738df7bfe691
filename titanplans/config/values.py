"""The types of configuration values: TOML values and command-line words to Python, checked.

A section's field is annotated with `bool`, `int`, `float`, `str`, a `Literal`, `list[str]`,
`dict[str, ...]`, `... | None` of these, or `Annotated[..., Rule]` where not every value of the
type will do. Nothing here knows a section or a key; `where` is only handed through to the message.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli

from titanplans.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """Which values of a type will do. `says` ends the sentence "expected an integer, ..."."""

    says: str
    holds: Callable[[Any], bool]


PositiveInt = Annotated[int, Rule("at least 1", lambda value: value >= 1)]
NaturalInt = Annotated[int, Rule("at least 0", lambda value: value >= 0)]
Seed = Annotated[int, Rule("from 0 to 2^63 - 1", lambda value: 0 <= value < 2**63)]
PositiveOrAuto = Annotated[int, Rule("at least 1, or -1", lambda value: value >= 1 or value == -1)]
PositiveFloat = Annotated[float, Rule("above 0", lambda value: value > 0)]
NaturalFloat = Annotated[float, Rule("at least 0", lambda value: value >= 0)]
Fraction = Annotated[float, Rule("from 0 to 1", lambda value: 0 <= value <= 1)]
FractionAboveZero = Annotated[float, Rule("above 0, at most 1", lambda value: 0 < value <= 1)]
FractionBelowOne = Annotated[float, Rule("at least 0, below 1", lambda value: 0 <= value < 1)]


class _Mismatch(Exception):
    """The value is not of the type; the caller names both."""


def from_toml(value: Any, hint: Any, where: str) -> Any:
    """Return a value that TOML gave as one of type `hint`: an integer where a float is meant becomes one.

    Raises:
        ConfigError: another type, not among the choices, or outside a Rule.
    """
    try:
        return _convert(value, hint)
    except _Mismatch:
        raise ConfigError(f"{where} = {show(value)}: expected {describe(hint)}") from None


def from_text(text: str, hint: Any, where: str) -> Any:
    """Return a word of the command line as a value of type `hint`.

    Lists are `a,b` or `["a", "b"]`, tables `{"a" = "b"}`, and `none` is None where that is allowed.

    Raises:
        ConfigError: as `from_toml`.
    """
    try:
        return _convert(_parse(text, hint), hint)
    except _Mismatch:
        raise ConfigError(f"{where} {text}: expected {describe(hint)}") from None


def is_flag(hint: Any) -> bool:
    """Tell whether a command-line option of this type may stand without a value."""
    return hint is bool


def describe(hint: Any) -> str:
    """Say in words what a type accepts: "an integer, at least 1"."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *rules = get_args(hint)
        return ", ".join([describe(base), *(rule.says for rule in rules)])
    if _is_union(hint):
        return " or ".join(describe(option) for option in get_args(hint) if option is not types.NoneType)
    if origin is Literal:
        return "one of " + ", ".join(show(choice) for choice in get_args(hint))
    if origin is dict and get_args(hint)[1] is not str:
        return f"a table, each value {describe(get_args(hint)[1])}"
    if origin is list and get_origin(get_args(hint)[0]) is Literal:
        return "a list of " + ", ".join(show(choice) for choice in get_args(get_args(hint)[0]))
    return {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list of strings",
        dict: "a table of strings",
    }[origin or hint]


def show(value: Any) -> str:
    """Write a value as its author would: true, not True."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return str(value)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _convert(value: Any, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin is Annotated:
        base, *rules = get_args(hint)
        value = _convert(value, base)
        if not all(rule.holds(value) for rule in rules):
            raise _Mismatch
        return value
    if _is_union(hint):
        for option in get_args(hint):
            try:
                return _convert(value, option)
            except _Mismatch:
                continue
        raise _Mismatch
    if origin is Literal:
        if value not in get_args(hint):
            raise _Mismatch
        return value
    if origin is list:
        if not isinstance(value, list):
            raise _Mismatch
        return [_convert(item, get_args(hint)[0]) for item in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise _Mismatch
        return {key: _convert(item, get_args(hint)[1]) for key, item in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # not isinstance: True is an int to Python, not to the job's author
        raise _Mismatch
    return value


def _parse(text: str, hint: Any) -> Any:
    """Read `text` as the kind of value that `hint` is; whether it fits is for `_convert` to say."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _parse(text, get_args(hint)[0])
    if _is_union(hint):
        options = get_args(hint)
        if types.NoneType in options and text.lower() == "none":
            return None
        # A table before a string: every word is a string.
        for option in sorted(options, key=lambda option: option is str):
            try:
                return _convert(_parse(text, option), option)
            except _Mismatch:
                continue
        raise _Mismatch
    if origin is list and not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if origin in (list, dict):
        try:
            return tomli.loads(f"value = {text}")["value"]
        except tomli.TOMLDecodeError:
            raise _Mismatch from None
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise _Mismatch
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise _Mismatch from None
    return text
