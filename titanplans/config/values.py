"""The types of options: a value of TOML, of the command line or of Python to one of the declared type, checked.

An option is annotated with `bool`, `int`, `float`, `str`, a `Literal`, `tuple[T, ...]`, `dict[str, T]`, other `Options`,
a union of these with or without None, or `Annotated[T, Rule]` where not every value of the type will do. What only
Python can give, such as a class, is `Annotated[Any, InPython("a TPPlan class")]`. No option is known by name here.
"""

import functools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli

from titanplans.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """Which values of a type will do. `says` ends the sentence "expected an integer, ..."."""

    says: str
    holds: Callable[[Any], bool]
    reads: Callable[[Any], Any] = lambda value: value
    """From what was written to the value that is kept."""


@dataclass(frozen=True)
class InPython:
    """Marks a value that has no form in TOML: any object but those that TOML has."""

    what: str


PositiveInt = Annotated[int, Rule("at least 1", lambda value: value >= 1)]
NaturalInt = Annotated[int, Rule("at least 0", lambda value: value >= 0)]
Natural32 = Annotated[int, Rule("from 0 to 2^31 - 1", lambda value: 0 <= value < 2**31)]
Positive32 = Annotated[int, Rule("from 1 to 2^31 - 1", lambda value: 1 <= value < 2**31)]
Seed = Annotated[int, Rule("from 0 to 2^63 - 1", lambda value: 0 <= value < 2**63)]
PositiveOrAuto = Annotated[int, Rule("at least 1, or -1", lambda value: value >= 1 or value == -1)]
PositiveFloat = Annotated[float, Rule("above 0", lambda value: value > 0)]
NaturalFloat = Annotated[float, Rule("at least 0", lambda value: value >= 0)]
Fraction = Annotated[float, Rule("from 0 to 1", lambda value: 0 <= value <= 1)]
FractionBelowOne = Annotated[float, Rule("at least 0, below 1", lambda value: 0 <= value < 1)]


class Mismatch(Exception):
    """The value is not of the type; the caller names both. Its text, if it has one, says more than the type does."""


Name = Annotated[str, Rule("not empty", lambda value: bool(value.strip()))]


def fit(value: Any, hint: Any) -> Any:
    """Return `value` as one of type `hint`: an integer becomes a float, a list a tuple, a table nested options.

    Raises:
        Mismatch: another type, not among the choices, or outside a Rule.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(value, *arguments)
    if _is_union(hint):
        return _first(arguments, lambda option: fit(value, option))
    if origin is Literal:
        # By type too: True equals 1, which is not what its author wrote.
        return _if(any(type(value) is type(choice) and value == choice for choice in arguments), value)
    if origin is tuple:
        _if(isinstance(value, (list, tuple)), value)
        return tuple(fit(item, arguments[0]) for item in value)
    if origin is dict:
        _if(isinstance(value, Mapping), value)
        return {fit(key, arguments[0]): fit(item, arguments[1]) for key, item in value.items()}
    if is_options(hint):
        return value if isinstance(value, hint) else _options(value, hint)
    if hint is float:
        # From 2^53 on a float is another number than the integer.
        whole = type(value) is int and abs(value) < 2**53
        return float(_if(whole or (type(value) is float and math.isfinite(value)), value))
    value = _if(type(value) is hint, value)
    if hint is int and not -(2**63) <= value < 2**63:
        raise Mismatch("expected an integer of at most 64 bits, as TOML has them")
    if hint is str and not _is_text(value):
        raise Mismatch("expected a string without NUL, of characters that UTF-8 has")
    return value


def from_toml(value: Any, hint: Any, where: str) -> Any:
    """Return a value that TOML gave as one of type `hint`.

    Raises:
        ConfigError: another type, not among the choices, or outside a Rule; `where` begins the message.
    """
    try:
        return fit(value, in_toml(hint))
    except Mismatch as mismatch:
        raise ConfigError(f"{where} = {show(value)}: {expected(mismatch, in_toml(hint))}") from None


def from_text(text: str, hint: Any, where: str) -> Any:
    """Return a word of the command line as a value of type `hint`.

    Lists are `a,b` or `["a", "b"]`, tables `{"a" = "b"}`, and `none` is None where that is allowed.

    Raises:
        ConfigError: as `from_toml`.
    """
    try:
        return _read_word(text, in_toml(hint))
    except Mismatch as mismatch:
        raise ConfigError(f"{where} {text}: {expected(mismatch, in_toml(hint))}") from None


def expected(mismatch: Mismatch, hint: Any) -> str:
    """Say what would have done for a value that is not of type `hint`."""
    return str(mismatch) or f"expected {describe(hint)}"


def _read_word(text: str, hint: Any) -> Any:
    return fit(_parse(text, hint), hint)


def is_options(hint: Any) -> bool:
    """Whether a type is a group of options."""
    return hasattr(hint, "from_dict")


def describe(hint: Any) -> str:
    """Say in words what a type accepts: "an integer, at least 1"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base, mark = arguments
        return mark.what if isinstance(mark, InPython) else f"{describe(base)}, {mark.says}"
    if _is_union(hint):
        return " or ".join(describe(option) for option in arguments if option is not types.NoneType)
    if origin is Literal:
        return "one of " + ", ".join(map(show, arguments))
    if origin is tuple:
        choices = get_args(arguments[0]) if get_origin(arguments[0]) is Literal else ()
        tables = is_options(arguments[0])
        return "a list of " + (", ".join(map(show, choices)) or ("tables" if tables else "strings"))
    if origin is dict:
        return (
            "a table of strings" if arguments[1] is str else f"a table, each value {describe(arguments[1])}"
        )
    if is_options(hint):
        return f"a table, or {hint.__name__}(...)"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[hint]


def in_toml(hint: Any) -> Any:
    """Return the part of a type that TOML has a form for; None if there is no such part."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return None if isinstance(arguments[1], InPython) else hint
    if _is_union(hint):
        return _union([part for option in arguments if (part := in_toml(option)) is not None])
    if origin is dict:
        return types.GenericAlias(dict, (arguments[0], in_toml(arguments[1])))
    return hint


def without_none_type(hint: Any) -> Any:
    """Return a type without None, which it may be a union with."""
    if not _is_union(hint):
        return hint
    return _union([option for option in get_args(hint) if option is not types.NoneType])


def show(value: Any) -> str:
    """Write a value as its author would, on one line: true, not True."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(show, value)) + "]"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{show(key)} = {show(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, int) and value.bit_length() > 64:
        text = f"{value:#x}"  # decimal digits in thousands are more than Python writes
    elif isinstance(value, type):
        text = value.__qualname__
    else:
        text = f"{type(value).__name__}(...)" if is_options(type(value)) else str(value)
    return " ".join(text.split())


def _if(holds: bool, value: Any) -> Any:
    if not holds:
        raise Mismatch
    return value


def _is_text(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def _annotated(value: Any, base: Any, mark: Rule | InPython) -> Any:
    if isinstance(mark, InPython):
        return _if(
            not isinstance(value, (bool, int, float, str, list, tuple, Mapping, types.NoneType)), value
        )
    value = mark.reads(fit(value, base))
    return _if(mark.holds(value), value)


def _options(value: Any, hint: Any) -> Any:
    if type(value) is bool and hint.of_bool is not None:
        return hint.from_dict(hint.of_bool[value])
    return hint.from_dict(_if(isinstance(value, Mapping), value))


def _first(options: Sequence[Any], read: Callable[[Any], Any]) -> Any:
    """Return what `read` makes of the first of a union's types that takes the value."""
    said: tuple[Any, ...] = ()
    for option in options:
        try:
            return read(option)
        except Mismatch as mismatch:
            said = said or mismatch.args
    raise Mismatch(*said)


def _union(parts: Sequence[Any]) -> Any:
    return functools.reduce(operator.or_, parts)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _parse(text: str, hint: Any) -> Any:
    """Read `text` as the kind of value that `hint` is; whether it fits is for `fit` to say."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _parse(text, get_args(hint)[0])
    if _is_union(hint):
        options = get_args(hint)
        if types.NoneType in options and text.lower() == "none":
            return None
        # A table before a string: every word is a string.
        return _first(
            sorted(options, key=lambda option: option is str), lambda option: _read_word(text, option)
        )
    if origin is tuple and not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if origin in (tuple, dict):
        try:
            return tomli.loads(f"value = {text}")["value"]
        except tomli.TOMLDecodeError:
            raise Mismatch from None
    if hint is bool:
        return _if(text.lower() in ("true", "false"), text).lower() == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise Mismatch from None
    return text
