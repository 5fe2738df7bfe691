"""The types of options; pydantic checks values from TOML, the command line and Python against them.

An option is annotated with `bool`, `int`, `float`, `str`, a `Literal` of strings, `tuple[T, ...]`, `dict[str, T]`, other
`Options`, a union of these with or without None, or `Annotated[T, ...]` with a bound of annotated_types or a `Constraint`.
"""

import contextlib
import functools
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli
from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
)

from titanplans.errors import ConfigError, OptionError
from titanplans.text import show


class Mismatch(ValueError):
    """A value does not have its option's type. The message ends with what is expected: "expected an integer, at least 1"."""


@dataclass(frozen=True)
class Constraint:
    """A condition on values. `says` is the end of the sentence "expected an integer, ..."."""

    says: str
    holds: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self._check).__get_pydantic_core_schema__(source, handler)

    def _check(self, value: Any) -> Any:
        if not self.holds(value):
            raise ValueError(self.says)
        return value


PositiveInt = Annotated[int, Ge(1)]
NaturalInt = Annotated[int, Ge(0)]
Natural32 = Annotated[int, Ge(0), Lt(2**31)]
Positive32 = Annotated[int, Ge(1), Lt(2**31)]
Seed = Annotated[int, Ge(0)]
PositiveOrAuto = Annotated[int, Constraint("at least 1, or -1", lambda value: value >= 1 or value == -1)]
PositiveFloat = Annotated[float, Gt(0)]
NaturalFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
FractionBelowOne = Annotated[float, Ge(0), Lt(1)]
NormLimit = Annotated[float, Constraint("above 0, or 0 for no clipping", lambda value: value >= 0)]


def _as_list(value: Any) -> Any:
    # A string that begins with a bracket is a malformed list.
    return (value,) if isinstance(value, str) and not value.startswith("[") else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
"""A list of strings. A single string stands for a list of one, as in peft's target_modules = "all-linear"."""
Name = Annotated[str, Constraint("not empty", lambda value: bool(value.strip()))]

_WORDS = {Any: "of any kind", bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


STRICT: Any = {"strict": True, "allow_inf_nan": False}
"""pydantic's settings: integers are converted to floats, and no other types are converted."""


def fit(value: Any, hint: Any) -> Any:
    """Convert `value` to type `hint`: an integer to a float, a list to a tuple, a table to nested options.

    Raises:
        Mismatch: the value is of another type, not among the choices, or violates a constraint.
        OptionError: a group of nested options refuses it.
    """
    try:
        return _adapter(hint).validate_python(writable(value))
    except ValidationError as error:
        raise mismatch(error.errors(include_url=False), hint) from None


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(**STRICT))


def mismatch(faults: Sequence[Mapping[str, Any]], hint: Any) -> Mismatch | OptionError:
    """Return the error of a value in which pydantic found these faults."""
    reasons = [fault.get("ctx", {}).get("error") for fault in faults]
    specific_reasons = [reason for reason in reasons if isinstance(reason, Mismatch | OptionError)]
    return specific_reasons[0] if specific_reasons else Mismatch(f"expected {describe(hint)}")


def writable(value: Any) -> Any:
    """Return a value with tuples in place of lists.

    Raises:
        Mismatch: an integer or a string can't be written in TOML.
    """
    if isinstance(value, list | tuple):
        return tuple(map(writable, value))
    if isinstance(value, Mapping):
        return {writable(key): writable(item) for key, item in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Mismatch("expected an integer of at most 64 bits, as in TOML")
    if isinstance(value, str) and any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in value):
        raise Mismatch("expected a string without NUL and unpaired surrogates")
    return value


def from_toml(value: Any, hint: Any, where: object) -> Any:
    """Convert a value of TOML to type `hint`, or raise a ConfigError that begins with `where`."""
    try:
        return fit(value, hint)
    except Mismatch as mismatch:
        raise ConfigError(f"{where} = {show(value)}: {mismatch}") from None


def from_text(text: str, hint: Any, where: object) -> Any:
    """Convert a word of the command line to type `hint`, or raise a ConfigError that begins with `where`.

    A list is written `a,b` or `["a", "b"]`, a table `{"a" = "b"}`, and None, if the type allows it, `none`.
    """
    reasons, general = [], f"expected {describe(hint)}"
    for value in _readings(text):
        try:
            return fit(value, hint)
        except Mismatch as mismatch:
            reasons.append(str(mismatch))
    raise ConfigError(f"{where} {text}: {next((why for why in reasons if why != general), general)}")


def _readings(word: str) -> Iterator[Any]:
    """Yield the values that a word of the command line can stand for, the word itself last."""
    if word.lower() == "none":
        yield None
    if word.lower() in ("true", "false"):
        yield word.lower() == "true"
    with contextlib.suppress(ValueError, RecursionError):
        document = tomli.loads(f"value = {word}")
        if document.keys() == {"value"} and not isinstance(document["value"], str):
            yield document["value"]
    with contextlib.suppress(ValueError):
        yield float(word)  # TOML has no .5 or 5.
    if not word.startswith("["):
        yield [part.strip() for part in word.split(",") if part.strip()]
    yield word


def is_options(hint: Any) -> bool:
    """Whether a type is a group of options."""
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def describe(hint: Any) -> str:
    """Describe the values of a type, except None: "an integer, at least 1"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        phrases = [describe(arguments[0])] if arguments[0] is not Any else []
        for mark in arguments[1:]:
            phrases += [
                f"{word} {getattr(mark, bound)}" for bound, word in _BOUNDS.items() if hasattr(mark, bound)
            ]
            phrases += [mark.says] if isinstance(mark, Constraint) else []
        return ", ".join(phrases)
    if _is_union(hint):
        return " or ".join(describe(option) for option in arguments if option is not NoneType)
    if origin is Literal:
        return "one of " + ", ".join(map(show, arguments))
    if origin is tuple:
        choices = ", ".join(map(show, get_args(arguments[0]))) if get_origin(arguments[0]) is Literal else ""
        return "a list of " + (choices or ("strings" if arguments[0] is str else "tables"))
    if origin is dict:
        return f"a table, each value {describe(arguments[1])}"
    return f"a table, or {hint.__name__}(...)" if is_options(hint) else _WORDS[hint]


def without_none_type(hint: Any) -> Any:
    """Return T for T | None, and any other type unchanged."""
    parts = [part for part in get_args(hint) if part is not NoneType]
    return functools.reduce(operator.or_, parts) if _is_union(hint) else hint


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


_UNKNOWN = re.compile(r"\$(\w+|\{)")


def expanded(text: str) -> str:
    """Return a path with `~`, `~user`, $NAME and ${NAME} replaced.

    Raises:
        Mismatch: the path is empty, or there is no such user or variable.
    """
    path = os.path.expanduser(os.path.expandvars(text))
    if not path.strip():
        raise Mismatch("expected a path, found an empty string; remove the key for its default")
    if path.startswith("~"):
        raise Mismatch(f"there is no user {path.split('/')[0]} here; write ./~ for a directory of that name")
    if unknown := _UNKNOWN.search(path):
        raise Mismatch(f"{unknown.group()} is not an environment variable; set it, or write the full path")
    return path


FilePath = Annotated[str, AfterValidator(expanded), Constraint("a path", bool)]
"""A path in which `~` and $NAME are expanded when the option is read; relative to the current folder."""
