"""The line of a key in a job file, searched for when an error or a note names the key, since tomli keeps no positions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from titanplans.errors import OptionError


@dataclass(frozen=True)
class KeyInFile:
    """A key or section of a TOML document, as messages name it: "job.toml, line 3: training.steps"."""

    document: str
    file: Path | None = None
    """The document's file, if lines of it can be named."""
    key: str = ""

    def __str__(self) -> str:
        return f"{self.line()}: {self.key}"

    def line(self, key: str = "", value: Any = None) -> str:
        """Return the document with the line of this key, or of another with this value: "job.toml, line 3"."""
        text = self.file.read_text(encoding="utf-8") if self.file else ""
        line = (key and line_of(text, key, value)) or line_of(text, self.key)
        return f"{self.document}, line {line}" if line else self.document


def located(error: OptionError, place: object) -> OptionError:
    """Return the error with the file and the line of its option, if `place` is in a file."""
    if not isinstance(place, KeyInFile):
        return error
    return OptionError(error.option, error.value, error.why, place.line(error.option, error.value))


def line_of(text: str, key: str, value: Any = None) -> int | None:
    """Return the line number at which a dotted key (with this value) or a section first appears; None if it does not."""
    lines, name = text.split("\n"), key.rpartition(".")[2]
    for number, line in enumerate(lines, 1):
        if name in line and _has(_shortest_document(lines, number), key, value):
            return number
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
