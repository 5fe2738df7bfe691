"""Where a long text is cut: at a line's end, else at a space, else between two characters."""

import itertools
from collections.abc import Callable, Iterator

PIECE_BYTES = 64 * 1024
"""Bytes of a document at most, about; longer text files and rows are cut at a line end."""


def boundary(read: Callable[[int, int], bytes | memoryview], place: int, most: int, size: int) -> int:
    """Return the offset of the first line that begins at byte `place` or later, at most `most` bytes further.

    If there is none, cut after the first space from `place` on, else at the end of the text if that is as near, else
    before the first character.

    Args:
        read: returns the bytes from an offset on, as many as asked for or as there are.
        place: an offset in the text.
        most: the length of a piece.
        size: of the text, in bytes; no cut lies beyond.
    """
    if place <= 0 or place >= size:
        return min(max(place, 0), size)
    seen = bytes(read(place - 1, most + 1))
    for mark in (b"\n", b" "):
        if (found := seen.find(mark)) >= 0:
            return place + found
    if place + most >= size:
        return size
    return place + next((i for i, byte in enumerate(seen[1:4]) if byte & 0xC0 != 0x80), 3)


def pieces(text: str) -> Iterator[str]:
    """Yield the documents that a row's text is cut into: the text itself, if it isn't long."""
    if len(text) * 4 <= PIECE_BYTES or len(row := text.encode()) <= PIECE_BYTES:
        yield text
        return
    places = [
        boundary(lambda place, n: row[place : place + n], p, PIECE_BYTES, len(row))
        for p in range(0, len(row), PIECE_BYTES)
    ]
    for begin, end in itertools.pairwise([*places, len(row)]):
        yield row[begin:end].decode()
