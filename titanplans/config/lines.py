"""Find the line of a key in a job file for messages, since tomli keeps no positions."""

import functools
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from titanplans.errors import OptionError


@dataclass(frozen=True)
class KeyInFile:
    """Location of a key or section in a TOML document. As a string: "job.toml, line 3: training.steps"."""

    document: str
    file: Path | None = None
    """The document's file; None if it has none, in which case messages name no line."""
    key: str = ""

    def __str__(self) -> str:
        return f"{self.line()}: {self.key}"

    def line(self, key: str = "", value: Any = None) -> str:
        """Return the document and a line, "job.toml, line 3": the line of `key` with this value; if it is not found, the
        line of this location's key.
        """
        text = self.file.read_text(encoding="utf-8") if self.file else ""
        line = (key and line_of(text, key, value)) or line_of(text, self.key)
        return f"{self.document}, line {line}" if line else self.document


def located(error: OptionError, location: object) -> OptionError:
    """Return the error with the file and line of its option, if `location` is a `KeyInFile`."""
    if not isinstance(location, KeyInFile):
        return error
    return OptionError(error.option, error.value, error.reason, location.line(error.option, error.value))


def line_of(text: str, key: str, value: Any = None) -> int | None:
    """Return the number of the first line with a dotted key (and this value) or a section; None if there is none."""
    return next((line for line, document in _documents(text) if _has(document, key, value)), None)


@functools.cache
def _documents(text: str) -> list[tuple[int, dict[str, Any]]]:
    """Parse every beginning of the text that is valid TOML by itself. Return each with the number of the line where its
    last value begins."""
    documents, begin, lines = [], 1, text.split("\n")
    for end in range(1, len(lines) + 1):
        with suppress(ValueError):
            documents.append((begin, tomli.loads("\n".join(lines[:end]))))
            begin = end + 1
    return documents


def _has(document: Any, key: str, value: Any) -> bool:
    if isinstance(document, list):
        return any(_has(item, key, value) for item in document)
    name, _, rest = key.partition(".")
    if not isinstance(document, dict) or name not in document:
        return False
    if rest:
        return _has(document[name], rest, value)
    return value in (None, document[name]) or str(value) == str(document[name])  # nan is not equal to itself
