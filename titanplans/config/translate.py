"""The keys of a job, from the names they were written by to today's.

A key of another release or of another project is renamed, with a note, or refused by name; a key that nobody
knows is refused with the nearest one that exists.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from titanplans.config.lines import KeyInFile, located
from titanplans.config.other_names import ELSEWHERE, REFUSED, RENAMED, REQUIRES_SWITCH
from titanplans.config.schema import keys
from titanplans.config.values import from_text, from_toml
from titanplans.errors import ConfigError, OptionError, nearest
from titanplans.text import show

Read = Callable[[Any, Any, object], Any]
"""Makes a value of a type of what a source has; the third argument begins the message of an error."""

PENDING = {"training.dataset_name": str, "training.varlen": bool, "training.context_len": int}
"""flame's keys, and their types, that mean something only together with others: see `load`."""

CONVERTERS = "model.converters"
_FLOAT8_CONVERTERS = (("quantize.linear.float8",), ("float8",))
"""torchtitan's names, in 0.2 and before, of the converter that is a section of its own here."""


class Unread(NamedTuple):
    """A key of REFUSED that was given. Whether it is refused depends on the job's other keys: see `refuse_or_note`."""

    where: object
    raw: Any
    asks: bool
    """Whether its value asks for something."""

    def refused(self, key: str) -> ConfigError:
        """Return the error that refuses it."""
        return ConfigError(f"{self.where} = {show(self.raw)} is not supported: {REFUSED[key].reason}")


class Given:
    """The values that were given, by today's keys; where several sources give a key, the last counts.

    Attributes:
        values: checked values by dotted key.
        unread: keys of REFUSED.
        notes: one line for each key that was read under another name.
        pending: keys of PENDING, and CONVERTERS with the place where it stands.
        places: where each value is from, by dotted key: a `KeyInFile` in a file, or an option of the command line.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.unread: dict[str, Unread] = {}
        self.notes: list[str] = []
        self.pending: dict[str, Any] = {}
        self.places: dict[str, object] = {}
        self._written: dict[tuple[Read, str], str] = {}

    def add(self, key: str, raw: Any, read: Read, where: object) -> None:
        """Take in `raw` under the key as it was written; `read` makes a value of the key's type.

        Raises:
            ConfigError: unknown key, value of another type, a key given under two names, or a module that adds keys.
        """
        if key in PENDING:
            self.pending[key] = read(raw, PENDING[key], where)
        elif key == "model.name" and raw == "fla":
            self.notes.append(f'{where} = "fla" (flame): the architecture is read from model.config')
        elif key == CONVERTERS and read(raw, tuple[str, ...], where) in _FLOAT8_CONVERTERS:
            self.pending[key] = where
        elif key in REFUSED:
            self.unread[key] = Unread(where, raw, not any(_is(raw, off, read) for off in REFUSED[key].off))
            if self.unread[key].asks and key == "job.custom_config_module":
                raise self.unread[key].refused(key)  # at once: the keys that it adds are unknown here
        else:
            self._take(key, raw, read, where)

    def _take(self, key: str, raw: Any, read: Read, where: object) -> None:
        old = RENAMED.get(key)
        today = old.to if old else key
        if today not in keys():
            raise ConfigError(f"{where}: {unknown(key)}")
        try:
            value = read(raw, keys()[today].hint, where)
        except OptionError as error:  # of one table of a list
            raise located(error, where) from error
        if (other := self._written.setdefault((read, today), key)) != key:
            raise ConfigError(f"{where}: {other} is the same key; keep {today}")
        if old:
            self.notes.append(f"{where} ({old.of}): read as {today} = {show(value)}")
        self.values[today], self.places[today] = value, where

    def add_tables(self, document: dict[str, Any], place: KeyInFile) -> None:
        """Take in a parsed TOML document; `place` is for messages.

        Raises:
            ConfigError: all keys that are unknown, or the first that is refused or has a value of another type.
        """
        values = list(flatten(document))
        if not any(key == "job.custom_config_module" for key, _ in values):  # which is refused first
            refuse_unknown(values, place)
        for key, raw in values:
            self.add(key, raw, from_toml, replace(place, key=key))

    def add_options(self, options: Iterable[tuple[str, str]]) -> None:
        """Take in options of the command line, as `(key, word)`; the last one of a key counts."""
        for key, word in dict(options).items():
            self.add(key, word, from_text, f"--{key}")


def _is(raw: Any, value: Any, read: Read) -> bool:
    try:
        if isinstance(value, list):
            return read(raw, tuple[str, ...], "") == tuple(value)
        return read(raw, type(value), "") == value
    except ConfigError:
        return False  # not even of its type


def refuse_or_note(unread: dict[str, Unread], values: dict[str, Any]) -> list[str]:
    """Refuse the keys of other projects that ask for a missing feature; return one note of those without effect.

    `values` are the job's, by today's keys.
    """

    def waits(key: str) -> bool:
        switch = REQUIRES_SWITCH.get(key)
        if switch in unread:
            return not unread[switch].asks
        return switch is not None and (switch not in values or values[switch] == keys()[switch].default)

    asking = [key for key in unread if unread[key].asks]
    for key in sorted(asking, key=lambda key: key in REQUIRES_SWITCH):  # switches first
        if not waits(key):
            raise unread[key].refused(key)
    inert = asking + [key for key in values if waits(key) and values[key] != keys()[key].default]
    by_switch: dict[str, list[str]] = {}
    for key in inert:
        by_switch.setdefault(REQUIRES_SWITCH[key], []).append(key)
    said = [f"{', '.join(names)} (as {switch} is not set)" for switch, names in by_switch.items()]
    return [f"keys without effect in this job: {'; '.join(said)}"] if said else []


def is_known(key: str) -> bool:
    """Whether a key is today's, or another project's."""
    return any(key in known for known in (keys(), RENAMED, REFUSED, PENDING))


def takes_no_value(key: str) -> bool:
    """Tell whether `--key` may stand alone on the command line."""
    if key in REFUSED:
        return any(isinstance(value, bool) for value in REFUSED[key].off)
    today = RENAMED[key].to if key in RENAMED else key
    return (keys()[today].hint if today in keys() else PENDING.get(key)) in (bool, bool | None)


def unknown(key: str) -> str:
    """Say that there is no such key, and which one may be meant."""
    section, _, name = key.rpartition(".")
    if key in _sections():
        return f"is a section, not a key; write [{key}]"
    if name in ELSEWHERE:
        return f"no such key; here it is {ELSEWHERE[name]}"
    if section and section not in _sections():
        return unknown_section(section)
    if meant := _meant(section, name):
        return f"no such key; did you mean {meant}?"
    return f"no such key; titanplans train --help {section} prints those there are"


def _meant(section: str, name: str) -> str | None:
    """Return the key that may be meant: one of this name in another section, or one like it in this section."""
    of_all = {key.name: dotted for dotted, key in reversed(keys().items())}
    known = [*REFUSED, *RENAMED, *keys()]
    near = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section} or of_all
    return of_all.get(name) or near.get(nearest(name, near) or "")


def unknown_section(section: str, keys_in_it: Iterable[str] = ()) -> str:
    """Say that there is no such section, and which one may be meant, or where the keys in it are here."""
    names = list(dict.fromkeys(key.section for key in keys().values()))
    if meant := nearest(section, names, cutoff=0.8):
        return f"no section [{section}]; did you mean {meant}?"
    by_name = {key.name: dotted for dotted, key in reversed(keys().items())} | ELSEWHERE
    if here := [f"{name} is {by_name[name]}" for name in keys_in_it if name in by_name]:
        return f"no section [{section}]; here {', '.join(here)}"
    return f"no section [{section}]; titanplans train --help prints those there are"


def refuse_unknown(values: Iterable[tuple[str, Any]], place: KeyInFile) -> None:
    """Refuse all unknown keys of a document, and tables that are no sections, and say which ones may be meant.

    Raises:
        ConfigError: `place`, with the line of each, begins the message.
    """
    reasons = [
        f"{place.line(key)}: {unknown_section(key, raw)}"
        if isinstance(raw, dict)
        else f"{replace(place, key=key)}: {unknown(key)}"
        for key, raw in values
        if not is_known(key)
    ]
    if len(reasons) == 1:
        raise ConfigError(reasons[0])
    if reasons:
        each = " | ".join(reason.removeprefix(f"{place.document}, ") for reason in reasons)
        raise ConfigError(f"{place.document} has {len(reasons)} unknown keys: {each}")


def _sections() -> set[str]:
    """Return every section that is known, today's and others', with those that only hold sections."""
    found = set()
    for key in [*keys(), *RENAMED, *REFUSED, *PENDING]:
        parts = key.split(".")
        found |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    return found


def flatten(table: dict[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys below `section` of a parsed TOML document, with their values, unread.

    A section that nobody knows is a key whose value is a table.
    """
    for name, value in table.items():
        key = f"{section}.{name}".lstrip(".")
        if isinstance(value, dict) and key in _sections() and key not in keys():
            yield from flatten(value, key)
        else:
            yield key, value
