"""`Options`, the base class of groups of options: a frozen pydantic model whose errors name the option. Also `read_toml`.

A subclass declares fields with a type, a default and, in a string below each field, its documentation. The types are in
`values`, and contradictions between options in `compatibility`.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import tomli
import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticSerializationError, to_jsonable_python

from titanplans.config.other_names import AUTOMODEL, AUTOMODEL_WORDS, REFUSED
from titanplans.config.values import STRICT, mismatch, writable
from titanplans.errors import ConfigError, OptionError, did_you_mean, either, nearest
from titanplans.text import show

Refusals = Iterator[tuple[str, str]]
"""Pairs of an option ("compile.mode" if it is in a nested group) and a text with the reason and the remedy."""


class Field(NamedTuple):
    """An option as it is declared."""

    name: str
    hint: Any
    default: Any
    doc: str
    section: str = ""
    """The section of the key in a job; "" for an option of a strategy."""


class Options(BaseModel):
    """A group of options. Subclasses declare fields, and creating an instance checks every value.

    Raises:
        OptionError: an option is unknown, has a value of another type, or contradicts another option; the message names
            it.
    """

    model_config = ConfigDict(
        **STRICT,
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    section: ClassVar[str] = ""
    """The prefix of the options' names in messages: "compile" in "compile.mode"."""

    of_bool: ClassVar[dict[bool, dict[str, Any]]] = {}
    """Maps true and false to the options that they stand for, if a bool may be given in place of the group."""

    refuses: ClassVar[Callable[[Any], Refusals] | None] = None
    """Function that yields the contradictions within the group."""

    def __init_subclass__(
        cls,
        *,
        section: str | None = None,
        of_bool: dict[bool, dict[str, Any]] | None = None,
        refuses: Callable[[Any], Refusals] | None = None,
    ) -> None:
        cls.section, cls.of_bool = cls.section if section is None else section, of_bool or {}
        cls.refuses = staticmethod(refuses) if refuses else None

    def __init__(self, /, **values: Any) -> None:
        values = self._rename_automodel(values)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._refusal(error, values) from None

    def model_post_init(self, context: Any) -> None:
        """Refuse options that contradict each other."""
        for option, why in self.refuses(self) if self.refuses else ():
            raise self.error(option, why)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        # In strict mode pydantic accepts no dict in place of a model. The fields stay strict.
        return handler(source) | {"strict": False}

    @model_validator(mode="before")
    @classmethod
    def _from_bool(cls, value: Any) -> Any:
        return cls.of_bool.get(value, value) if type(value) is bool else value

    @field_validator("*", mode="before")
    @classmethod
    def _writable(cls, value: Any) -> Any:
        return writable(value)

    @classmethod
    def _rename_automodel(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values with NeMo Automodel's names and words replaced by this project's."""
        option_names = [field.name for field in options_of(cls)]
        for name in [
            name for name in values if name not in option_names and AUTOMODEL.get(name) in option_names
        ]:
            today, value, words = AUTOMODEL[name], values.pop(name), AUTOMODEL_WORDS.get(name)
            if today in values:
                raise OptionError(
                    cls.full_name(today), values[today], f"{name} is the same option: keep {today}"
                )
            values[today] = words[value] if words and type(value) is bool else value
        return values

    @classmethod
    def _refusal(cls, error: ValidationError, values: dict[str, Any]) -> OptionError:
        """Return the error of the first unknown option or, if all are known, of the first option with a wrong value."""
        faults = error.errors(include_url=False)
        fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
        options_by_name = {field.name: field for field in options_of(cls)}
        if not fault["loc"]:
            return fault["ctx"]["error"]  # an OptionError of `refuses`
        name = str(fault["loc"][0])
        if name not in options_by_name:
            refused = REFUSED.get(f"{cls.section or 'parallelism'}.{name}")
            reason = refused.reason if refused else did_you_mean(name, options_by_name)
            return OptionError(cls.full_name(name), values[name], f"no such option; {reason}")
        why = mismatch(
            [one for one in faults if one["loc"][:1] == fault["loc"][:1]], options_by_name[name].hint
        )
        value = values[name] if name in values else options_by_name[name].default
        return why if isinstance(why, OptionError) else OptionError(cls.full_name(name), value, str(why))

    @classmethod
    def full_name(cls, option: str) -> str:
        """Return the name of an option, preceded by the name of its group: "compile.mode"."""
        return f"{cls.section}.{option}".lstrip(".")

    def error(self, option: str, why: str) -> OptionError:
        """Return the error for the value of `option`, which may be in a nested group: "compile.mode"."""
        return OptionError(self.full_name(option), get(self, option), why)

    def replace(self, **changes: Any) -> Self:
        """Return a copy of the options with `changes`."""
        return type(self)(**dict(self) | changes)

    def to_dict(self, *, exclude_none: bool = False) -> dict[str, Any]:
        """Return the options as dicts, lists, strings and numbers.

        Raises:
            OptionError: the plan is a Python object.
        """
        try:
            return to_jsonable_python(self, exclude_none=exclude_none)
        except PydanticSerializationError:
            raise self.error("plan", "a Python object can't be written in TOML; give its name") from None

    def to_toml(self) -> str:
        """Return the options as TOML, without those that are None, which TOML can't express. Raises like `to_dict`."""
        return tomli_w.dumps(self.to_dict(exclude_none=True))


@functools.cache
def options_of(cls: type[Options]) -> tuple[Field, ...]:
    """Return the fields of a group of options, in the order in which they are declared."""
    return tuple(
        Field(
            info.alias or name,
            Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation,  # pyrefly: ignore
            info.get_default(call_default_factory=True),
            " ".join((info.description or "").split()),
        )
        for name, info in cls.model_fields.items()
    )


def get(options: Any, option: str) -> Any:
    """Return the value of an option, which may be in a nested group: "compile.mode"."""
    for name in option.split("."):
        options = getattr(options, "class_" if name == "class" else name)
    return options


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the values of a TOML text.

    Raises:
        ConfigError: the text is not TOML. The message begins with `where`, and has the line and the column.
    """
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        line = text.split("\n")[error.lineno - 1].strip()
        raise ConfigError(
            f"{where}, line {error.lineno}, column {error.colno}: {error.msg}, in {line!r}"
        ) from None
    # E.g. a number of thousands of digits, or a thousand nested arrays.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}; no key needs that") from None


def read_toml(path: Path, what: str = "job file") -> dict[str, Any]:
    """Return the values of a TOML file, which messages call `what`.

    Raises:
        ConfigError: the file can't be read (the message names other files), or it is not TOML.
    """
    try:
        if path.is_file():  # opening a pipe would block
            if path.suffix != ".toml":
                kind = f"a {path.suffix} file" if path.suffix else "a file without an ending"
                kind = "YAML, probably another tool's" if path.suffix in (".yaml", ".yml") else kind
                raise ConfigError(
                    f"{path} is {kind}, but a {what} is TOML, with a name that ends in .toml; docs/config.md lists the "
                    "names of other tools' keys here"
                )
            return parse_toml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}), so not TOML") from None
    except OSError as error:
        raise ConfigError(f"{path}: this {what} can't be read ({error.strerror}); name another") from None
    folder = path if path.is_dir() else path.parent
    # pyproject.toml is not a job.
    others = [file for file in sorted(folder.glob("*.toml")) if file.name != "pyproject.toml"]
    below = [file for file in sorted(folder.glob("*/*.toml")) if not file.parent.name.startswith(".")]
    by_name = {file.name: str(file) for file in [*below, *others]}
    instead = f"did you mean {by_name[meant]}?" if (meant := nearest(path.name, by_name)) else ""
    instead = instead or (f"there are {', '.join(map(str, others))}" if others else "name one that exists")
    raise ConfigError(f"{path}: no such {what}; {instead}")


def needs(options: Any, switch: str, values: tuple[Any, ...], *names: str) -> Refusals:
    """Refuse each of the options `names` that is set although it has no effect, because `switch` has none of `values`."""
    value, choices = get(options, switch), either([show(choice) for choice in values])
    for name in names:
        if value not in values and get(options, name) != default(options, name):
            now = "unset" if value is None else show(value)
            key = type(options).full_name(switch)
            remedy = "enable it" if values == (True,) else f"it is {now}: change it"
            yield name, f"has no effect unless {key} = {choices}; {remedy} or remove this key"


def default(options: Any, name: str) -> Any:
    """Return the default of an option of this group. A job may have another default than the section's class."""
    first, _, rest = name.partition(".")
    value = fields(type(options))[first]
    return get(value, rest) if rest else value


def fields(*groups: Any) -> dict[str, Any]:
    """Return the defaults of all options of some groups, by name."""
    return {field.name: field.default for group in groups for field in options_of(group)}
