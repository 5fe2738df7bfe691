"""The line of a key in a job file, searched for when an error or a note names the key, since tomli keeps no positions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli


@dataclass(frozen=True)
class TomlSource:
    """The origin of a TOML document, by its name in messages."""

    name: str
    file: Path | None = None
    """Its file, if lines of it can be named."""

    def at(self, key: str) -> str:
        """Return the file with the line of a dotted key or of a section: "job.toml, line 3"."""
        line = line_of(self.file.read_text(encoding="utf-8"), key) if self.file else None
        return self.name if line is None else f"{self.name}, line {line}"


@dataclass(frozen=True)
class KeyInFile:
    """A key of a document, as messages name it."""

    source: TomlSource
    key: str

    def __str__(self) -> str:
        return f"{self.source.at(self.key)}: {self.key}"


def line_of(text: str, key: str) -> int | None:
    """Return the number of the line on which a dotted key, its section or its first table begins; None if none does."""
    lines, name = text.split("\n"), key.rpartition(".")[2]
    for start in [number for number, line in enumerate(lines) if name in line]:
        if _has(_shortest_document(lines, start + 1), key):
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


def _has(document: Any, key: str) -> bool:
    for part in key.split("."):
        if isinstance(document, list):
            return True
        if not isinstance(document, dict) or part not in document:
            return False
        document = document[part]
    return True
