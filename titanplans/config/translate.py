"""Translate the keys of a job file and a command line to the keys here.

A key of an earlier release or of another project is renamed, with a note, or refused with the reason. An unknown key is
refused, with the nearest key as a suggestion.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from titanplans.config.lines import KeyInFile, located
from titanplans.config.other_names import ELSEWHERE, REFUSED, RENAMED, REQUIRES_SWITCH
from titanplans.config.schema import keys
from titanplans.config.values import from_text, from_toml
from titanplans.errors import ConfigError, OptionError, nearest
from titanplans.text import show

Read = Callable[[Any, Any, object], Any]
"""Converts a raw value to a type; the third argument is the beginning of an error's message."""

PENDING = {"training.dataset_name": str, "training.varlen": bool, "training.context_len": int}
"""Types of those keys of flame that can be translated only together with other keys; `load` translates them."""

CONVERTERS = "model.converters"
_FLOAT8_CONVERTERS = (("quantize.linear.float8",), ("float8",))
"""Values of model.converters, in torchtitan 0.2 and before, that ask for the section [quantize.linear.float8] here."""


class RefusedKey(NamedTuple):
    """A key in REFUSED that a job has. Whether this is an error depends on the job's other keys: see `refuse_or_note`."""

    location: object
    raw: Any
    has_effect: bool
    """False if the key has one of the values that have no effect."""

    def error(self, key: str) -> ConfigError:
        """Return the error that refuses this key, `key`."""
        return ConfigError(f"{self.location} = {show(self.raw)} is not supported: {REFUSED[key].reason}")


class ParsedKeys:
    """The values of a job file and a command line, by the keys here. A value that is added later replaces an earlier one.

    Attributes:
        values: checked values by dotted key.
        refused: the keys in REFUSED that the job has.
        notes: one line for each key that was renamed.
        pending: values of the keys in PENDING, and the location of CONVERTERS.
        locations: where each value is from, by dotted key: a `KeyInFile`, or the option on the command line.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.refused: dict[str, RefusedKey] = {}
        self.notes: list[str] = []
        self.pending: dict[str, Any] = {}
        self.locations: dict[str, object] = {}
        self._written: dict[tuple[Read, str], str] = {}

    def add(self, key: str, raw: Any, read: Read, location: object) -> None:
        """Add the raw value of a key, which may have another project's name; `read` converts the value to the key's type.

        Raises:
            ConfigError: the key is unknown, has a value of another type, is given under two names, or names a module that
                adds keys.
        """
        if key in PENDING:
            self.pending[key] = read(raw, PENDING[key], location)
        elif key == "model.name" and raw == "fla":
            self.notes.append(f'{location} = "fla" (flame): the architecture is read from model.config')
        elif key == CONVERTERS and read(raw, tuple[str, ...], location) in _FLOAT8_CONVERTERS:
            self.pending[key] = location
        elif key in REFUSED:
            self.refused[key] = RefusedKey(
                location, raw, not any(_is(raw, off, read) for off in REFUSED[key].off)
            )
            if self.refused[key].has_effect and key == "job.custom_config_module":
                # This key is refused first, since the keys that the module adds are unknown here.
                raise self.refused[key].error(key)
        else:
            self._take(key, raw, read, location)

    def _take(self, key: str, raw: Any, read: Read, location: object) -> None:
        old = RENAMED.get(key)
        today = old.to if old else key
        if today not in keys():
            raise ConfigError(f"{location}: {unknown(key)}")
        try:
            value = read(raw, keys()[today].hint, location)
        except OptionError as error:  # about an option in a list of tables
            raise located(error, location) from error
        if (other := self._written.setdefault((read, today), key)) != key:
            raise ConfigError(f"{location}: {other} is the same key; keep {today}")
        if old:
            self.notes.append(f"{location} ({old.of}): read as {today} = {show(value)}")
        self.values[today], self.locations[today] = value, location

    def add_tables(self, document: dict[str, Any], location: KeyInFile) -> None:
        """Add a parsed TOML document.

        Raises:
            ConfigError: keys are unknown or have values of another type (the message names all of them), or a key is
                refused.
        """
        values = list(flatten(document))
        # A custom config module adds keys, so it is refused before unknown ones.
        if not any(key == "job.custom_config_module" for key, _ in values):
            refuse_unknown(values, location)
        self._add_all(
            ((key, raw, from_toml, replace(location, key=key)) for key, raw in values), location.document
        )

    def add_options(self, options: Iterable[tuple[str, str]]) -> None:
        """Add pairs of a key and a word of the command line; the last pair of a key counts. Raises like `add_tables`."""
        self._add_all(
            ((key, word, from_text, f"--{key}") for key, word in dict(options).items()), "the command line"
        )

    def _add_all(self, values: Iterable[tuple[str, Any, Read, object]], document: str) -> None:
        errors = []
        for arguments in values:
            try:
                self.add(*arguments)
            except ConfigError as error:
                errors.append(error)
        _raise_all(errors, document, "wrong keys")


def _is(raw: Any, value: Any, read: Read) -> bool:
    try:
        if isinstance(value, list):
            return read(raw, tuple[str, ...], "") == tuple(value)
        return read(raw, type(value), "") == value
    except ConfigError:
        return False  # it is of another type


def refuse_or_note(refused: dict[str, RefusedKey], values: dict[str, Any]) -> list[str]:
    """Refuse other projects' keys for features that do not exist here. Return a list with a note about keys without
    effect.

    Args:
        refused: the keys in REFUSED that the job has.
        values: the job's values, by the keys here.
    """

    def lacks_switch(key: str) -> bool:
        switch = REQUIRES_SWITCH.get(key)
        if switch in refused:
            return not refused[switch].has_effect
        return switch is not None and (switch not in values or values[switch] == keys()[switch].default)

    effective = [key for key in refused if refused[key].has_effect]
    for key in sorted(effective, key=lambda key: key in REQUIRES_SWITCH):  # switches first
        if not lacks_switch(key):
            raise refused[key].error(key)
    inert = effective + [key for key in values if lacks_switch(key) and values[key] != keys()[key].default]
    by_switch: dict[str, list[str]] = {}
    for key in inert:
        by_switch.setdefault(REQUIRES_SWITCH[key], []).append(key)
    groups = [f"{', '.join(names)} (as {switch} is not set)" for switch, names in by_switch.items()]
    return [f"keys without effect in this job: {'; '.join(groups)}"] if groups else []


def is_known(key: str) -> bool:
    """Whether this is a key here or a known key of another project."""
    return any(key in table for table in (keys(), RENAMED, REFUSED, PENDING))


def takes_no_value(key: str) -> bool:
    """Return whether `--key` may be written without a value on the command line."""
    if key in REFUSED:
        return any(isinstance(value, bool) for value in REFUSED[key].off)
    today = RENAMED[key].to if key in RENAMED else key
    return (keys()[today].hint if today in keys() else PENDING.get(key)) in (bool, bool | None)


def unknown(key: str) -> str:
    """Return a phrase that says that there is no such key, and suggests the key that may be meant."""
    section, _, name = key.rpartition(".")
    if key in _sections():
        return f"is a section, not a key; write [{key}]"
    if name in ELSEWHERE:
        return f"no such key; here it is {ELSEWHERE[name]}"
    if section and section not in _sections():
        return unknown_section(section)
    if meant := _meant(section, name):
        return f"no such key; did you mean {meant}?"
    return f"no such key; titanplans train --help {section} prints the keys of this section"


def _meant(section: str, name: str) -> str | None:
    """Return the key that may be meant: one of this name in another section, or a similar one in this section."""
    of_all = {key.name: dotted for dotted, key in reversed(keys().items())}
    all_keys = [*REFUSED, *RENAMED, *keys()]
    near = {k.rpartition(".")[2]: k for k in all_keys if k.rpartition(".")[0] == section} or of_all
    return of_all.get(name) or near.get(nearest(name, near) or "")


def unknown_section(section: str, keys_in_it: Iterable[str] = ()) -> str:
    """Return a phrase that says that there is no such section, and suggests a similar section, or the keys here that are
    named like keys in it."""
    names = list(dict.fromkeys(key.section for key in keys().values()))
    if meant := nearest(section, names, cutoff=0.8):
        return f"no section [{section}]; did you mean {meant}?"
    by_name = {key.name: dotted for dotted, key in reversed(keys().items())} | ELSEWHERE
    if here := [f"{name} is {by_name[name]}" for name in keys_in_it if name in by_name]:
        return f"no section [{section}]; here {', '.join(here)}"
    return f"no section [{section}]; titanplans train --help prints all sections"


def refuse_unknown(values: Iterable[tuple[str, Any]], location: KeyInFile) -> None:
    """Refuse all unknown keys and sections of a document in one error, which suggests similar keys and sections.

    Raises:
        ConfigError: some are unknown; the message names each with its line.
    """
    reasons = [
        f"{location.line(key)}: {unknown_section(key, raw)}"
        if isinstance(raw, dict)
        else f"{replace(location, key=key)}: {unknown(key)}"
        for key, raw in values
        if not is_known(key)
    ]
    _raise_all([ConfigError(reason) for reason in reasons], location.document, "unknown keys")


def _raise_all(errors: Sequence[ConfigError], document: str, what: str) -> None:
    """Raise the only error; or, if there are several, one that lists them: "job.toml has 2 unknown keys: line 3: ... |
    line 5: ..."."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        each = " | ".join(str(error).removeprefix(f"{document}, ") for error in errors)
        raise ConfigError(f"{document} has {len(errors)} {what}: {each}")


def _sections() -> set[str]:
    """Return all known sections, here and in other projects, including those that contain only sections."""
    sections = set()
    for key in [*keys(), *RENAMED, *REFUSED, *PENDING]:
        parts = key.split(".")
        sections |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    return sections


def flatten(table: dict[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys below `section` of a parsed TOML document, with their raw values.

    An unknown section is yielded as a key whose value is a table.
    """
    for name, value in table.items():
        key = f"{section}.{name}".lstrip(".")
        if isinstance(value, dict) and key in _sections() and key not in keys():
            yield from flatten(value, key)
        else:
            yield key, value
