"""One layer of a job (its TOML, or its command line) from the keys it was written in to today's.

A key of another release or of flame is renamed, with a note, or refused by name; a key that nobody
knows is refused with the nearest one that exists.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from titanplans.config.lines import KeyInFile, TomlSource, located
from titanplans.config.other_names import ELSEWHERE, REFUSED, RENAMED, REQUIRES_SWITCH
from titanplans.config.schema import keys
from titanplans.config.values import from_text, from_toml
from titanplans.errors import ConfigError, OptionError, nearest
from titanplans.text import show

_NOWHERE = TomlSource("")

PENDING = {"training.dataset_name": str, "training.varlen": bool, "training.context_len": int}
"""flame's keys, and their types, that mean something only together with others: see `load`."""

CONVERTERS = "model.converters"
_FLOAT8_CONVERTERS = ("quantize.linear.float8", "float8")
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


class Layer:
    """Values of one source, by today's keys.

    Attributes:
        values: checked values by dotted key.
        unread: keys of REFUSED that were given.
        notes: one line for each key that was read under another name.
        pending: keys of PENDING that were given.
        places: where each value is from, by dotted key: a `KeyInFile` in a file, or an option of the command line.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.unread: dict[str, Unread] = {}
        self.notes: list[str] = []
        self.pending: dict[str, Any] = {}
        self.places: dict[str, object] = {}
        self._written: dict[str, str] = {}

    def add(self, key: str, raw: Any, read: Callable[[Any, Any, object], Any], where: object) -> None:
        """Take in `raw` under the key as it was written; `read` makes a value of the key's type.

        Raises:
            ConfigError: unknown key, value of another type, a key given under two names, or a module that adds keys.
        """
        if key in PENDING:
            self.pending[key] = read(raw, PENDING[key], where)
        elif key == "model.name" and raw == "fla":
            self.notes.append(f'{where} = "fla" (flame): the architecture is read from model.config')
        elif key == CONVERTERS and _is_float8(raw, read, where):
            self.pending[key] = where
        elif key in REFUSED:
            asks = not any(_is_off(raw, value, read, where) for value in REFUSED[key].off)
            self.unread[key] = Unread(where, raw, asks)
            if asks and key == "job.custom_config_module":
                raise self.unread[key].refused(key)  # at once: the keys that it adds are unknown here
        else:
            self._take(key, raw, read, where)

    def _take(self, key: str, raw: Any, read: Callable[[Any, Any, object], Any], where: object) -> None:
        old = RENAMED.get(key)
        today = old.to if old else key
        if today not in keys():
            raise ConfigError(f"{where}: {unknown(key)}")
        try:
            value = read(raw, keys()[today].hint, where)
        except OptionError as error:  # of one table of a list
            raise located(error, where) from error
        if self._written.setdefault(today, key) != key:
            raise ConfigError(f"{where}: {self._written[today]} is the same key; keep {today}")
        if old:
            self.notes.append(f"{where} ({old.of}): read as {today} = {show(value)}")
        self.values[today], self.places[today] = value, where


def _is_float8(raw: Any, read: Callable[[Any, Any, object], Any], where: object) -> bool:
    names = read(raw, tuple[str, ...], where)
    return len(names) == 1 and names[0] in _FLOAT8_CONVERTERS


def _is_off(raw: Any, off: Any, read: Callable[[Any, Any, object], Any], where: object) -> bool:
    try:
        if isinstance(off, list):
            return read(raw, tuple[str, ...], where) == tuple(off)
        return read(raw, type(off), where) == off
    except ConfigError:
        return False  # not even of its type


def refuse_or_note(unread: dict[str, Unread], values: dict[str, Any]) -> list[str]:
    """Refuse the keys of other projects that ask for a missing feature; return one note of those without effect.

    Args:
        unread: such keys, of all layers.
        values: the job's values by today's keys, of all layers.

    Raises:
        ConfigError: the first key that is refused.
    """
    inert = []
    for key, item in sorted(unread.items(), key=lambda given: given[0] in REQUIRES_SWITCH):  # switches first
        if item.asks and not _waits_for_switch(key, unread, values):
            raise item.refused(key)
        if item.asks:
            inert.append(key)
    inert += [
        key
        for key in values
        if key in REQUIRES_SWITCH and _waits_for_switch(key, unread, values) and values[key] != ()
    ]
    by_switch: dict[str, list[str]] = {}
    for key in inert:
        by_switch.setdefault(REQUIRES_SWITCH[key], []).append(key)
    said = [f"without {switch} {', '.join(names)}" for switch, names in by_switch.items()]
    return [f"keys without effect in this job: {'; '.join(said)}"] if said else []


def _waits_for_switch(key: str, unread: dict[str, Unread], values: dict[str, Any]) -> bool:
    switch = REQUIRES_SWITCH.get(key)
    if switch in unread:
        return not unread[switch].asks
    return switch is not None and (switch not in values or values[switch] == keys()[switch].default)


def read_tables(document: dict[str, Any], source: TomlSource) -> Layer:
    """Return the layer of a parsed TOML document; `source` is for messages."""
    layer = Layer()
    for key, raw in flatten(document, "", source):
        layer.add(key, raw, from_toml, KeyInFile(source, key))
    return layer


def read_options(options: Iterable[tuple[str, str | None]]) -> Layer:
    """Return the layer of command-line options, as `(key, word)`; the last one of a key counts.

    Raises:
        ConfigError: as `Layer.add`, or an option has no word.
    """
    layer = Layer()
    for key, word in dict(options).items():
        if word is None:
            known = key in {*keys(), *RENAMED, *REFUSED, *PENDING}
            missing = f"the value is missing; write --{key} VALUE or --{key}=VALUE"
            raise ConfigError(f"--{key}: {missing if known else unknown(key)}")
        layer.add(key, word, from_text, f"--{key}")
    return layer


def takes_no_value(key: str) -> bool:
    """Tell whether `--key` may stand alone on the command line."""
    if key in REFUSED:
        return any(isinstance(value, bool) for value in REFUSED[key].off)
    if key in PENDING:
        return PENDING[key] is bool
    today = RENAMED[key].to if key in RENAMED else key
    return today in keys() and keys()[today].hint in (bool, bool | None)


def unknown(key: str) -> str:
    """Say that there is no such key, and which one may be meant."""
    section, _, name = key.rpartition(".")
    if key in _sections():
        return f"is a section, not a key; write [{key}]"
    if name in ELSEWHERE:
        return f"no such key; here it is {ELSEWHERE[name]}"
    if not section:
        elsewhere = {key.name: dotted for dotted, key in reversed(keys().items())}
        meant = nearest(name, list(elsewhere))
        return "is in no section" + (f"; did you mean {elsewhere[meant]}?" if meant else "")
    if section not in _sections():
        return unknown_section(section)
    own = {key.name: dotted for dotted, key in keys().items() if key.section == section}
    old = {k.rpartition(".")[2]: k for k in [*RENAMED, *REFUSED] if k.rpartition(".")[0] == section}
    same_name = [dotted for dotted in keys() if dotted.endswith("." + name)]
    close = (names[near] for names in (own, old) if (near := nearest(name, list(names))))
    if meant := next(iter(same_name), None) or next(close, None):
        return f"no such key; did you mean {meant}?"
    return f"no such key; [{section}] has {', '.join(own) or 'none'}"


def unknown_section(section: str) -> str:
    """Say that there is no such section, and which one may be meant."""
    names = list(dict.fromkeys(key.section for key in keys().values()))
    meant = nearest(section, names)
    return f"no section [{section}]; " + (
        f"did you mean [{meant}]?" if meant else f"there are {', '.join(names)}"
    )


def _sections() -> set[str]:
    """Return every section that is known, today's and others', with those that only hold sections."""
    found = set()
    for key in [*keys(), *RENAMED, *REFUSED, *PENDING]:
        parts = key.split(".")
        found |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    return found


def flatten(
    table: dict[str, Any], section: str = "", source: TomlSource = _NOWHERE
) -> Iterable[tuple[str, Any]]:
    """Yield the dotted keys below `section` of a parsed TOML document, with their values, unread.

    Raises:
        ConfigError: a section that nobody knows; `source`, with its line, begins the message.
    """
    for name, value in table.items():
        key = f"{section}.{name}".lstrip(".")
        if isinstance(value, dict) and key not in keys():
            if key not in _sections():
                raise ConfigError(f"{source.at(key)}: {unknown_section(key)}")
            yield from flatten(value, key, source)
        else:
            yield key, value
