"""The types of options: a value of TOML, of the command line or of Python, checked by pydantic against the declared type.

An option is annotated with `bool`, `int`, `float`, `str`, a `Literal` of strings, `tuple[T, ...]`, `dict[str, T]`, other
`Options`, a union of these with or without None, or `Annotated[T, ...]` with a bound of annotated_types or a `Constraint`. A
class, which TOML can't write, is `Annotated[Any, PythonObject("a TPPlan class")]`. No option is known by name here.
"""

import contextlib
import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError

from titanplans.errors import ConfigError, OptionError
from titanplans.text import show


class Mismatch(ValueError):
    """A value is not of its type. The text ends a sentence that names both: "expected an integer, at least 1"."""


@dataclass(frozen=True)
class Constraint:
    """A condition on the values of a type. `says` ends the sentence "expected an integer, ..."."""

    says: str
    holds: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self._check).__get_pydantic_core_schema__(source, handler)

    def _check(self, value: Any) -> Any:
        if not self.holds(value):
            raise ValueError(self.says)
        return value


def PythonObject(says: str) -> Constraint:
    """Return the constraint of a value that TOML has no form for."""
    plain = (bool, int, float, str, list, tuple, Mapping, types.NoneType)
    return Constraint(says, lambda value: not isinstance(value, plain))


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
Name = Annotated[str, Constraint("not empty", lambda value: bool(value.strip()))]

_WORDS = {Any: "of any kind", bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_BOUNDS = {Ge: ("at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le"), Lt: ("below", "lt")}


def fit(value: Any, hint: Any) -> Any:
    """Return `value` as one of type `hint`: an integer becomes a float, a list a tuple, a table nested options.

    Raises:
        Mismatch: another type, not among the choices, or against a constraint.
        OptionError: nested options refuse the value.
    """
    try:
        return _adapter(hint).validate_python(_without_lists(value))
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_input=False):
            reason = fault.get("ctx", {}).get("error")
            if isinstance(reason, Mismatch | OptionError):
                raise reason from None
        raise Mismatch(f"expected {describe(hint)}") from None


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    return TypeAdapter(hint, config=None if is_options(hint) else strict)


def _without_lists(value: Any) -> Any:
    """Return a value with tuples for lists; an integer that TOML can't hold or a string that no file can is refused."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_without_lists, value))
    if isinstance(value, Mapping):
        return {_without_lists(key): _without_lists(item) for key, item in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Mismatch("expected an integer of at most 64 bits, as TOML has them")
    if isinstance(value, str) and any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in value):
        raise Mismatch("expected a string without NUL and unpaired surrogates")
    return value


def from_toml(value: Any, hint: Any, where: object) -> Any:
    """Return a value that TOML gave as one of type `hint`.

    Raises:
        ConfigError: another type, not among the choices, or against a constraint; `where` begins the message.
    """
    try:
        return fit(value, in_toml(hint))
    except Mismatch as mismatch:
        raise ConfigError(f"{where} = {show(value)}: {mismatch}") from None


def from_text(text: str, hint: Any, where: object) -> Any:
    """Return a word of the command line as a value of type `hint`.

    Lists are `a,b` or `["a", "b"]`, tables `{"a" = "b"}`, and `none` is None where that is allowed.

    Raises:
        ConfigError: as `from_toml`.
    """
    hint = in_toml(hint)
    reasons, general = [], f"expected {describe(hint)}"
    for value in _readings(text):
        try:
            return fit(value, hint)
        except Mismatch as mismatch:
            reasons.append(str(mismatch))
    raise ConfigError(f"{where} {text}: {next((why for why in reasons if why != general), general)}")


def _readings(word: str) -> Iterator[Any]:
    """Yield the values that a word may stand for, a string last."""
    if word.lower() == "none":
        yield None
    if word.lower() in ("true", "false"):
        yield word.lower() == "true"
    with contextlib.suppress(ValueError, RecursionError):
        document = tomli.loads(f"value = {word}")
        if document.keys() == {"value"} and not isinstance(document["value"], str):
            yield document["value"]
    with contextlib.suppress(ValueError):
        yield float(word)  # .5 and 5., which TOML does not have
    if not word.startswith("["):
        yield [part.strip() for part in word.split(",") if part.strip()]
    yield word


def is_options(hint: Any) -> bool:
    """Whether a type is a group of options."""
    return hasattr(hint, "from_dict")


def describe(hint: Any) -> str:
    """Say in words what a type accepts: "an integer, at least 1"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base, *marks = arguments
        return ", ".join(
            [describe(base)] * (base is not Any) + [said for mark in marks if (said := _said(mark))]
        )
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
    return f"a table, or {hint.__name__}(...)" if is_options(hint) else _WORDS[hint]


def _said(mark: Any) -> str | None:
    if type(mark) in _BOUNDS:
        words, name = _BOUNDS[type(mark)]
        return f"{words} {getattr(mark, name)}"
    return mark.says if isinstance(mark, Constraint) else None


def in_toml(hint: Any) -> Any:
    """Return the part of a type that TOML has a form for; None if there is no such part."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated and arguments[0] is Any:
        return None
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


def _union(parts: Sequence[Any]) -> Any:
    return functools.reduce(operator.or_, parts)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)
