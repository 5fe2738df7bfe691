"""`TextColumn` reads a column of texts; `boundary` decides where long texts are cut into documents."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from titanplans.errors import DataError
from titanplans.training.data.data_errors import expect

FRAGMENT_BYTES = 64 * 1024
"""The approximate maximum size of a document in bytes; longer text files and rows are cut."""


class TextColumn:
    """Reads a column of texts.

    Args:
        name: the name of the column; dotted for a nested field, "content.body".

    Attributes:
        key: a JSON value that cached rows depend on, besides the files.
        features: names and types of the Arrow columns of a row that has been read.
        identity: values that a checkpoint stores. If they are equal in a job, a position means the same document in both.
    """

    def __init__(self, name: str):
        self.name = self.key = name
        self.features = {name: "string"}
        self.identity = {"text_column": name, "piece_bytes": FRAGMENT_BYTES}

    def columns(self, available: Sequence[str], where: str) -> list[str]:
        """Return which of the `available` columns to read. Raises DataError if the column is missing."""
        first = self.name.partition(".")[0]
        if self.name not in available and first in available:
            return [first]  # a nested field
        if self.name not in available:
            names = ", ".join(map(repr, sorted(available)))
            raise DataError(
                f"text_column = {self.name!r}: {where} has the columns {names}; name the one with the text"
            )
        return [self.name]

    def read(self, row: object, where: str) -> dict[str, str]:
        """Return a row in the form in which Arrow stores it. Raises DataError, which names `where`, if the row can't be
        used."""
        fields = expect(row, dict, where, f"an object with {self.name!r}", "repair the file or leave it out")
        (column,) = self.columns(list(fields), where)
        value = fields[column]
        for key in self.name.split(".")[1:] if column != self.name else ():
            value = value.get(key) if isinstance(value, dict) else None
        where = f"text_column = {self.name!r}: {where}"
        remedy = "name a column of texts, or leave such rows out"
        return {self.name: expect(value, str, where, "texts", remedy)}

    def fragments(self, record: dict[str, str]) -> Iterator[dict[str, str]]:
        """Yield the documents of a row, in the form in which Arrow stores them."""
        return ({self.name: fragment} for fragment in fragments(self.read(record, "a row")[self.name]))

    def document(self, fragment: dict[str, str]) -> str:
        """Return the text of a document."""
        return fragment[self.name]


def boundary(read: Callable[[int, int], bytes | memoryview], offset: int, length: int, size: int) -> int:
    """Return where to cut a text near byte `offset`: at the first line that begins there or at most `length` bytes later.

    If no line begins in this range, cut after the first space in it. If there is no space, cut at the end of the text if
    that is in the range, otherwise before the first UTF-8 character in the range.

    Args:
        read: `read(offset, n)` returns the n bytes from `offset` on, or fewer at the end.
        offset: where the cut would be if lines were ignored.
        length: the length of a fragment, in bytes.
        size: the size of the text, in bytes.
    """
    if offset <= 0 or offset >= size:
        return min(max(offset, 0), size)
    window = bytes(read(offset - 1, length + 1))
    for mark in (b"\n", b" "):
        if (index := window.find(mark)) >= 0:
            return offset + index
    if offset + length >= size:
        return size
    # Skip the continuation bytes of a character, at most 3.
    return offset + next((i for i, byte in enumerate(window[1:4]) if byte & 0xC0 != 0x80), 3)


def fragments(text: str) -> Iterator[str]:
    """Yield the documents that a row's text is cut into; a short text is one document."""
    # A character has at most 4 bytes, so most short texts are recognised without encoding them.
    if len(text) * 4 <= FRAGMENT_BYTES or len(encoded := text.encode()) <= FRAGMENT_BYTES:
        yield text
        return
    offsets = [
        boundary(lambda offset, n: encoded[offset : offset + n], start, FRAGMENT_BYTES, len(encoded))
        for start in range(0, len(encoded), FRAGMENT_BYTES)
    ]
    for begin, end in itertools.pairwise([*offsets, len(encoded)]):
        yield encoded[begin:end].decode()
