"""The rows of a stream, each of one source, and those that are left of all streams once one has ended.

A mixture says which source each row of a stream is from, by weight: arithmetic on the row's number, the same on every rank.
So weights are shares of the rows, however long the documents of a source are.
"""

import itertools
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import grain

from titanplans.training.data.mixture import PackedSource
from titanplans.training.data.packing import Window
from titanplans.training.data.streams import Cursor, SourcePlace


class Row(NamedTuple):
    """A window, and the number of the source that it is from."""

    window: Window[Any]
    source: int


class Mixture:
    """Which source a row is from.

    Args:
        weights: of the sources; one of weight 0 has no row.
        since: the row of each stream from which on these weights count.
    """

    def __init__(self, weights: Sequence[float], since: int = 0) -> None:
        self.drawn = [number for number, weight in enumerate(weights) if weight]
        numbers = [grain.MapDataset.source([number]).repeat() for number in self.drawn]
        self._sources = grain.MapDataset.mix(numbers, [weights[number] for number in self.drawn])
        self._since = since

    def source(self, stream: int, row: int, left: Collection[int]) -> int:
        """Return the number of the source of a stream's row, the next row's where that one is not `left`.

        Streams are out of step, so that each batch is mixed.
        """
        if len(left) == 1:
            return next(iter(left))
        rows = itertools.count(row - self._since + stream)
        return next(number for row in rows if (number := int(self._sources[row])) in left)  # type: ignore[arg-type]


class StreamRows:
    """The rows of a stream, asked for by rising numbers; those between are left to other ranks.

    Args:
        parts: the sources.
        mixture: of them; None: one after another.
        stream: which of `streams`.
        streams: how many there are.
        cursor: where the first row begins.
        epochs: of each source; None: it begins anew at each end.
    """

    def __init__(
        self,
        parts: Sequence[PackedSource],
        mixture: Mixture | None,
        stream: int,
        streams: int,
        cursor: Cursor,
        *,
        epochs: int | None,
    ) -> None:
        self._mixture, self._stream = mixture, stream
        self.cursor = cursor._replace(places=cursor.places or (SourcePlace(),) * len(parts))
        self._windows = [
            part.windows(stream, streams, place, epochs=epochs)
            for part, place in zip(parts, self.cursor.places, strict=True)
        ]
        self._left = list(range(len(parts)) if mixture is None else mixture.drawn)

    def row(self, number: int) -> Row | None:
        """Return the row of that number; None if the stream has come to its end before."""
        found = None
        while self.cursor.windows <= number:
            found = self.next_row()
            if found is None:
                return None
        return found

    def next_row(self) -> Row | None:
        """Return the next row; None at the end of all sources."""
        while self._left:
            source = self._left[0]
            if self._mixture is not None:
                source = self._mixture.source(self._stream, self.cursor.windows, self._left)
            if (window := next(self._windows[source], None)) is not None:
                places = list(self.cursor.places)
                places[source] = _place(window)
                self.cursor = Cursor(self.cursor.windows + 1, tuple(places))
                return Row(window, source)
            self._left.remove(source)
        return None


def _place(window: Window[Any]) -> SourcePlace:
    """Return where the next row begins; `ahead` matches no document where rows were packed across epochs."""
    (epoch, document, digest), last = window.next_document, window.last_read
    ahead = None
    if last is not None:
        ahead = (json.dumps(last[1]), last[2]) if last[0] == epoch else ("", "")
    return SourcePlace(epoch, document, window.next_offset, digest, ahead, window.packed)


class RestOfStreams:
    """The rows that are left of all streams, one stream after another, asked for by rising numbers from 0.

    Args:
        open_stream: opens one where it stands.
        streams: how many there are.
    """

    def __init__(self, open_stream: Callable[[int], StreamRows], streams: int) -> None:
        self._streams = map(open_stream, range(streams))
        self._rows: StreamRows | None = None
        self._stream = -1
        self.read = 0
        """Rows that were read; at the end, all."""
        self.cursors: dict[int, Cursor] = {}
        """Of the streams that were read from."""

    def row(self, number: int) -> Row | None:
        """Return the row of that number; None if there are fewer."""
        found = None
        while self.read <= number:
            found = None if self._rows is None else self._rows.next_row()
            if found is not None:
                assert self._rows is not None
                self.read += 1
                self.cursors[self._stream] = self._rows.cursor
                continue
            self._rows = next(self._streams, None)
            self._stream += 1
            if self._rows is None:
                return None
        return found
