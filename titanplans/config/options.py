"""`Options`: a frozen dataclass whose values are checked when it is made, read and written as dicts and TOML.

A group of options is declared once, as a subclass: its fields, each with its type, its default and, as a string below it,
its documentation. What a field accepts is in `values`, contradictions between options in `compatibility`.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import keyword
import textwrap
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, dataclass_transform, get_type_hints

import tomli
import tomli_w
from pydantic import GetCoreSchemaHandler, PlainValidator

from titanplans.config.other_names import AUTOMODEL, AUTOMODEL_WORDS, REFUSED
from titanplans.config.values import Mismatch, fit, in_toml
from titanplans.errors import ConfigError, OptionError, nearest

Refusals = Iterator[tuple[str, str]]
"""An option, "compile.mode" for one of a nested group, and the reason with the remedy."""


class Field(NamedTuple):
    """An option as it is declared."""

    name: str
    hint: Any
    """Its type, which may include None and Python objects."""
    default: Any
    doc: str


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
class Options:
    """A group of options. Subclasses declare fields; making one checks every value.

    Raises:
        OptionError: no such option, a value of another type, or one that contradicts another; names the option.
    """

    section: ClassVar[str] = ""
    """The prefix of its options' names in messages: "compile" for "compile.mode"."""

    of_bool: ClassVar[dict[bool, dict[str, Any]] | None] = None
    """The options that true and false stand for, where a bool may stand in for the group."""

    refuses: ClassVar[Callable[[Any], Refusals] | None] = None
    """Yields the contradictions within such a group: an option, and the reason with the remedy."""

    def __init_subclass__(
        cls,
        *,
        section: str | None = None,
        of_bool: dict[bool, dict[str, Any]] | None = None,
        refuses: Callable[[Any], Refusals] | None = None,
    ) -> None:
        cls.section, cls.of_bool = cls.section if section is None else section, of_bool
        cls.refuses = staticmethod(refuses) if refuses else None
        dataclasses.dataclass(frozen=True, kw_only=True, init=False)(cls)

    def __init__(self, /, **values: Any) -> None:
        values = self._by_todays_names(values)
        fields = {field.name: field for field in options_of(type(self))}
        for name in [name for name in values if name not in fields]:
            raise OptionError(self.full_name(name), values[name], f"no such option; {self._instead(name)}")
        for name, field in fields.items():
            value = values.get(name, field.default)
            try:
                value = fit(value, field.hint)
            except Mismatch as mismatch:
                raise OptionError(self.full_name(name), value, str(mismatch)) from None
            object.__setattr__(self, name, value)
            if keyword.iskeyword(name):  # the attribute that can be read
                object.__setattr__(self, f"{name}_", value)
        for option, why in self.refuses(self) if self.refuses else ():
            raise self.error(option, why)

    def _by_todays_names(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return values by the options' names, given by attributes' ("class_") and by NeMo Automodel's names, too."""
        known = {field.name for field in options_of(type(self))}
        found = {name: value for name, value in values.items() if not name.endswith("_")}
        for name, value in values.items():
            found.setdefault(name.removesuffix("_"), value)
        for name in [name for name in found if name not in known and AUTOMODEL.get(name) in known]:
            today, value, words = AUTOMODEL[name], found.pop(name), AUTOMODEL_WORDS.get(name)
            if today in found:
                raise OptionError(
                    self.full_name(today), found[today], f"{name} is the same option: keep {today}"
                )
            found[today] = words[value] if words and type(value) is bool else value
        return found

    def _instead(self, name: str) -> str:
        """Say what to write in place of an option that this group does not have."""
        known = [field.name for field in options_of(type(self))]
        if refused := REFUSED.get(f"{self.section or 'parallelism'}.{name}"):
            return refused.reason
        meant = nearest(name, known)
        return f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"

    @classmethod
    def full_name(cls, option: str) -> str:
        """Return the name of an option with the group's: "compile.mode"."""
        return f"{cls.section}.{option}".lstrip(".")

    def error(self, option: str, why: str) -> OptionError:
        """Return the error for the value of `option`, which may be one of a nested group: "compile.mode"."""
        return OptionError(self.full_name(option), attrgetter(option)(self), why)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return PlainValidator(cls._accept).__get_pydantic_core_schema__(Any, handler)

    @classmethod
    def _accept(cls, value: Any) -> Self:
        if isinstance(value, cls):
            return value
        if type(value) is bool and cls.of_bool is not None:
            value = cls.of_bool[value]
        if not isinstance(value, Mapping):
            raise ValueError(cls.__name__)  # which of the types would do is said by whoever has the value
        return cls.from_dict(value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the options with these values, and defaults elsewhere; raises what making one does."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as dicts, lists, strings and numbers, None among them.

        Raises:
            OptionError: a value has no such form, such as a class.
        """
        values = {}
        for field in options_of(type(self)):
            value = getattr(self, field.name)
            try:
                fit(value, in_toml(field.hint))
            except Mismatch:
                raise self.error(field.name, "a Python object has no form in TOML; give its name") from None
            values[field.name] = plain(value)
        return values

    def to_toml(self) -> str:
        """Return the options as TOML; those that are None, for which TOML has no word, are left out.

        Raises:
            OptionError: as `to_dict`.
        """
        return tomli_w.dumps(without_none(self.to_dict()))

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Return the options that `text` says, and defaults elsewhere.

        Raises:
            ConfigError: not TOML, with line and column.
            OptionError: no such option, or a value that it can't have.
        """
        return cls.from_dict(parse_toml(text, cls.__name__))


@functools.cache
def options_of(cls: type[Options]) -> tuple[Field, ...]:
    """Return the fields of a group of options, in the order in which they are declared."""
    hints, docs = get_type_hints(cls, include_extras=True), {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Options) and base is not Options:
            docs |= _docs(base)
    found = []
    for item in dataclasses.fields(cls):  # pyrefly: ignore[bad-argument-type]
        made = item.default_factory is not dataclasses.MISSING
        default = item.default_factory() if made else item.default  # pyrefly: ignore[not-callable]
        # An underscore behind a word of Python's is not part of the option's name.
        name = item.name.removesuffix("_")
        found.append(Field(name, hints[item.name], default, docs.get(item.name, "")))
    return tuple(found)


def _docs(cls: type) -> dict[str, str]:
    """Return the string that stands below each field in the source, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # pyrefly: ignore[missing-attribute]
    docs = {}
    for statement, below in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(statement.target, ast.Name)
            docs[statement.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the values of a TOML text; `where` begins the message of an error.

    Raises:
        ConfigError: not TOML, with line and column.
    """
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{where}, line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError:  # Python's own limit on the digits of a number
        raise ConfigError(
            f"{where}: an integer has thousands of digits; TOML allows at most 64 bits"
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{where}: arrays or tables are nested a thousand deep; no key needs that"
        ) from None


def read_toml(path: Path, what: str = "job file") -> dict[str, Any]:
    """Parse a TOML file, which is called `what` in messages.

    Raises:
        ConfigError: no such file (with the others of its directory), not text, or not TOML (with line and column).
    """
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}), so not TOML") from None
    except OSError as error:
        raise ConfigError(f"{path}: this {what} can't be read ({error.strerror}); name another") from None
    if text is None:
        reason = f"is a directory, not a {what}" if path.is_dir() else f"no such {what}"
        folder = path if path.is_dir() else path.parent
        others = sorted(str(other) for other in folder.glob("*.toml"))
        raise ConfigError(f"{path}: {reason}" + (f"; there are {', '.join(others)}" if others else ""))
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"{path}: a {what} is TOML ([section], key = value), and this is YAML by its name; convert it"
        )
    return parse_toml(text, str(path))


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested tables without values that are None, tables last, as TOML wants them."""
    plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, dict)}
    for key, value in plain.items():
        if isinstance(value, list):
            plain[key] = [without_none(item) if isinstance(item, dict) else item for item in value]
    return plain | {key: without_none(value) for key, value in values.items() if isinstance(value, dict)}


def plain(value: Any) -> Any:
    """Return a value with dicts for groups of options, and lists for tuples."""
    if isinstance(value, Options):
        return value.to_dict()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value
