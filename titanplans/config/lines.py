"""The line of a key in a job file, searched for when an error or a note names the key, since tomli keeps no positions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from titanplans.errors import OptionError


@dataclass(frozen=True)
class TomlSource:
    """The origin of a TOML document, by its name in messages."""

    name: str
    file: Path | None = None
    """Its file, if lines of it can be named."""

    def at(self, key: str, value: Any = None) -> str:
        """Return the file with the line of a dotted key or of a section: "job.toml, line 3"."""
        line = line_of(self.file.read_text(encoding="utf-8"), key, value) if self.file else None
        return self.name if line is None else f"{self.name}, line {line}"


@dataclass(frozen=True)
class KeyInFile:
    """A key of a document, as messages name it."""

    source: TomlSource
    key: str

    def __str__(self) -> str:
        return f"{self.source.at(self.key)}: {self.key}"


def located(error: OptionError, place: object) -> OptionError:
    """Return the error with the file and the line of its option; unchanged if `place` is not a `KeyInFile`."""
    if not isinstance(place, KeyInFile):
        return error
    where = place.source.at(place.key)
    if error.option.startswith(f"{place.key}."):  # a key of one table of a list, or a default there
        inside = place.source.at(error.option, error.value)
        where = where if inside == place.source.name else inside
    return OptionError(error.option, error.value, error.why, where)


def line_of(text: str, key: str, value: Any = None) -> int | None:
    """Return the line number at which a dotted key (with this value) or a section first appears; None if it does not."""
    lines, name = text.split("\n"), key.rpartition(".")[2]
    for start in [number for number, line in enumerate(lines) if name in line]:
        if _has(_shortest_document(lines, start + 1), key, value):
            return start + 1
    return None


def _shortest_document(lines: list[str], least: int) -> dict[str, Any]:
    """Return the document of the first `least` lines, and of those that end the value of the last one."""
    for end in range(least, len(lines) + 1):
        try:
            return tomli.loads("\n".join(lines[:end]))
        except ValueError:
            pass
    return {}


def _has(document: Any, key: str, value: Any) -> bool:
    if isinstance(document, list):
        return any(_has(item, key, value) for item in document)
    name, _, rest = key.partition(".")
    if not isinstance(document, dict) or name not in document:
        return False
    if rest:
        return _has(document[name], rest, value)
    return value in (None, document[name]) or str(value) == str(document[name])  # as of nan
