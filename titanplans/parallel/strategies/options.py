"""What every strategy's options have in common: checked types, and dicts and TOML that read back as equal options.

Options that TOML has no word for (None) are left out and mean their default, so None is only ever a default.
"""

import difflib
import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

import tomli

from titanplans.errors import ParallelError

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    dict: "a table",
    tuple: "a list",
}


class Options:
    """A frozen dataclass whose values are checked when it is made; lists become tuples, tables nested options.

    A field's type is bool, int, float, str, a Literal, a tuple or dict of these, other Options, or a union.
    Any other class that a union names is for Python alone: it has no form in a dict or in TOML.
    """

    title: ClassVar[str]
    """What messages call these options: a strategy's name, or the name of the nested table."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):  # pyrefly: ignore[bad-argument-type]
            value = getattr(self, item.name)
            try:
                fitting = _fit(value, hints[item.name])
            except _Mismatch:
                raise ParallelError(
                    f"{self.title}.{item.name} = {_show(value)}: expected {_describe(hints[item.name])}"
                ) from None
            object.__setattr__(self, item.name, fitting)
        self.check()

    def check(self) -> None:
        """Refuse values that their types allow; for subclasses."""

    def refuse(self, name: str, why: str) -> ParallelError:
        """Return the error for the value of `name`: the reason and the remedy are `why`."""
        return ParallelError(f"{self.title}.{name} = {_show(getattr(self, name))}: {why}")

    def to_dict(self) -> dict[str, Any]:
        """Return the options as dicts, lists, strings and numbers, None among them.

        Raises:
            ParallelError: a value has no such form, such as a class.
        """
        return {
            item.name: _plain(getattr(self, item.name), f"{self.title}.{item.name}")
            for item in fields(self)  # pyrefly: ignore[bad-argument-type]
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the options with these values, and defaults elsewhere.

        Raises:
            ParallelError: no such option, or a value that it can't have.
        """
        names = [item.name for item in fields(cls)]  # pyrefly: ignore[bad-argument-type]
        for name in values:
            if name not in names:
                raise ParallelError(f"{cls.title}.{name}: no such option; {instead(name, names)}")
        return cls(**values)

    def to_toml(self) -> str:
        """Return the options as TOML; those that are None are left out.

        Raises:
            ParallelError: a value has no form in TOML, such as a class.
        """
        tables: dict[str, dict[str, Any]] = {"": {}}
        for name, value in self.to_dict().items():
            if isinstance(value, dict):
                tables[name] = value
            else:
                tables[""][name] = value
        return "\n".join(_table(name, table) for name, table in tables.items())

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Return the options that `text` says, and defaults elsewhere.

        Raises:
            ParallelError: not TOML (with line and column), no such option, or a value that it can't have.
        """
        return cls.from_dict(read_toml(text, cls.title))


class _Mismatch(Exception):
    """A value is not of its field's type; the caller names both."""


def read_toml(text: str, title: str) -> dict[str, Any]:
    """Return the values of a TOML text.

    Raises:
        ParallelError: not TOML, with line and column.
    """
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ParallelError(f"{title}, line {error.lineno}, column {error.colno}: {error.msg}") from None


def _fit(value: Any, hint: Any) -> Any:
    """Return `value` as one of type `hint`: an integer where a float is meant becomes one, and so on."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _fit(value, option)
            except _Mismatch:
                continue
        raise _Mismatch
    if origin is Literal:
        # By type too: True equals 1, which is not what its author wrote.
        if any(type(value) is type(choice) and value == choice for choice in arguments):
            return value
        raise _Mismatch
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_fit(item, arguments[0]) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {_fit(key, arguments[0]): _fit(item, arguments[1]) for key, item in value.items()}
    if origin is type and isinstance(value, type) and issubclass(value, arguments[0]):
        return value
    if origin is not None:
        raise _Mismatch
    if issubclass(hint, Options):
        if isinstance(value, Mapping):
            return hint.from_dict(value)
    elif hint is float:
        if type(value) is float and math.isfinite(value):
            return value
        if type(value) is int and abs(value) < 2**53:  # from there on a float is another number
            return float(value)
        raise _Mismatch
    elif hint in (bool, int, str, types.NoneType):
        if type(value) is hint:
            return value
        raise _Mismatch
    if isinstance(value, hint):
        return value
    raise _Mismatch


def _describe(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in arguments if option is not types.NoneType)
    if origin is Literal:
        return "one of " + ", ".join(_show(choice) for choice in arguments)
    if origin is tuple:
        return "a list of strings" if arguments[0] is str else f"a list, each {_describe(arguments[0])}"
    if origin is type:
        return f"a {arguments[0].__name__} class"
    if isinstance(hint, type) and issubclass(hint, Options):
        return f"a table, or {hint.__name__}(...)"
    return _WORDS.get(origin or hint, f"a {getattr(hint, '__name__', hint)}")


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Options):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, where) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ParallelError(
        f"{where} = {_show(value)}: an object of Python's can't be written down; name it in words, or "
        "keep these options in Python"
    )


def instead(name: str, names: Sequence[str]) -> str:
    """Say which of `names` was meant by `name`: the nearest, or all of them."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"


def _table(name: str, table: dict[str, Any]) -> str:
    lines = [f"[{name}]"] if name else []
    lines += [f"{_key(key)} = {_toml(value)}" for key, value in table.items() if value is not None]
    return "".join(f"{line}\n" for line in lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which only JSON lets through.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _key(name: str) -> str:
    return name if name.isascii() and name.isidentifier() else _toml(name)


def _show(value: Any) -> str:
    if isinstance(value, Options):
        return f"{type(value).__name__}(...)"
    if isinstance(value, type):
        return value.__qualname__
    return " ".join((_toml(value) if isinstance(value, bool) else repr(value)).split())
