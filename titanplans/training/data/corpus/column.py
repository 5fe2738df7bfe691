"""The column of texts: which rows of a file are documents, and which end the job; and where a long text is cut.

It is cut at a line's end, else at a space, else between two characters.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from titanplans.errors import DataError
from titanplans.training.data.reading import expect

FRAGMENT_BYTES = 64 * 1024
"""Bytes of a document at most, about; longer text files and rows are cut at a line end."""


class TextColumn:
    """Reads rows of text.

    Attributes:
        key: a JSON value on which a cached row depends, next to the files.
        features: Arrow's columns and types of a row that has been read.
        identity: what must be the same for a checkpoint to go on.
    """

    def __init__(self, name: str):
        self.name = self.key = name
        self.features = {name: "string"}
        self.identity = {"text_column": name, "piece_bytes": FRAGMENT_BYTES}

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        """Return the columns that are read of those that a file has. Raises DataError where one is missing."""
        first = self.name.partition(".")[0]
        if self.name not in there and first in there:
            return [first]  # a field in a field: "content.body"
        if self.name not in there:
            found = ", ".join(map(repr, sorted(there)))
            raise DataError(
                f"text_column = {self.name!r}: {where} has the columns {found}; name the one with the text"
            )
        return [self.name]

    def read(self, row: object, where: str) -> dict[str, str]:
        """Return a row as Arrow holds it. Raises DataError, which names `where`, for one that can't be used."""
        found = expect(row, dict, where, f"an object with {self.name!r}", "repair the file or leave it out")
        (column,) = self.columns(list(found), where)
        value = found[column]
        for key in self.name.split(".")[1:] if column != self.name else ():
            value = value.get(key) if isinstance(value, dict) else None
        where, remedy = (
            f"text_column = {self.name!r}: {where}",
            "name a column of texts, or leave such rows out",
        )
        return {self.name: expect(value, str, where, "texts", remedy)}

    def fragments(self, record: dict[str, str]) -> Iterator[dict[str, str]]:
        """Cut a row into its documents, each as Arrow holds it."""
        return ({self.name: fragment} for fragment in fragments(self.read(record, "a row")[self.name]))

    def document(self, fragment: dict[str, str]) -> str:
        """Return the text of a document."""
        return fragment[self.name]


def boundary(read: Callable[[int, int], bytes | memoryview], offset: int, most: int, size: int) -> int:
    """Return the offset of the first line that begins at byte `offset` or later, at most `most` bytes further.

    If there is none, cut after the first space from `offset` on, else at the end of the text if that is as near, else
    before the first character.

    Args:
        read: returns the bytes from an offset on, as many as asked for or as there are.
        offset: an offset in the text.
        most: the length of a fragment.
        size: of the text, in bytes; no cut lies beyond.
    """
    if offset <= 0 or offset >= size:
        return min(max(offset, 0), size)
    seen = bytes(read(offset - 1, most + 1))
    for mark in (b"\n", b" "):
        if (found := seen.find(mark)) >= 0:
            return offset + found
    if offset + most >= size:
        return size
    return offset + next((i for i, byte in enumerate(seen[1:4]) if byte & 0xC0 != 0x80), 3)


def fragments(text: str) -> Iterator[str]:
    """Yield the documents that a row's text is cut into: the text itself, if it isn't long."""
    if len(text) * 4 <= FRAGMENT_BYTES or len(row := text.encode()) <= FRAGMENT_BYTES:
        yield text
        return
    offsets = [
        boundary(lambda offset, n: row[offset : offset + n], p, FRAGMENT_BYTES, len(row))
        for p in range(0, len(row), FRAGMENT_BYTES)
    ]
    for begin, end in itertools.pairwise([*offsets, len(row)]):
        yield row[begin:end].decode()
