"""The rows of one data-parallel rank, as an iterable that can begin at any place of a run.

No token is ever saved: a resumed run tokenises the documents again in which a stream stopped.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.loss import IGNORE_INDEX

from titanplans.errors import DataError
from titanplans.training.data.mixture import PackedSource
from titanplans.training.data.stream_rows import Mixture, RestOfStreams, Row, StreamRows
from titanplans.training.data.streams import BatchSlice, Cursor, DataPosition


class StepBatch(NamedTuple):
    """A rank's share of one global batch, each tensor `[share, seq_len]` int64."""

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    cursors: dict[int, Cursor]
    """Where the streams that it was cut from go on."""
    lengths: list[tuple[int, int]]
    """Of each row its source's number, and its tokens without those that fill it up."""
    long: list[int]
    """Documents of each source that were longer than a row since the share before, and cut or left out."""


class Ended(NamedTuple):
    """In place of a share: a stream has ended; the rest of the others is to be read one after another."""


class PackedText(IterableDataset):
    """The shares of one rank, one after another; a loader's worker makes every n-th.

    Args:
        parts: the sources.
        seq_len: tokens in a row.
        share: this rank's.
        start: where the next `iter` begins.
        weights: of the sources; None: one after another.
        epochs: of the data, after which a last global batch is filled up with ignored labels; None: they are repeated.
    """

    def __init__(
        self,
        parts: Sequence[PackedSource],
        seq_len: int,
        share: BatchSlice,
        start: DataPosition,
        *,
        weights: Sequence[float] | None,
        epochs: int | None = None,
    ) -> None:
        self._parts, self._seq_len, self._share = parts, seq_len, share
        self._weights, self._epochs = weights, epochs
        self.beginning = self.start = start

    def __iter__(self) -> Iterator[StepBatch | DataError | Ended]:
        start, self.start = self.start, self.beginning
        worker = get_worker_info()
        return self._batches(start, worker.id if worker is not None else 0)

    def _batches(self, start: DataPosition, worker: int) -> Iterator[StepBatch | DataError | Ended]:
        readers: dict[int, StreamRows] = {}
        rest = RestOfStreams(lambda stream: self._rows(stream, start), start.streams.count)
        for step in itertools.count(worker, self._share.workers):
            rows, cursors = [], {}
            try:
                for sequence in self._share.of(start.sequences, step):
                    if start.rest:
                        rows.append(rest.row(sequence - start.sequences))
                        cursors = dict(rest.cursors)
                        continue
                    stream, number = start.streams.place(sequence)
                    if stream not in readers:
                        readers[stream] = self._rows(stream, start)
                    rows.append(readers[stream].row(number))
                    cursors[stream] = readers[stream].cursor
            except DataError as error:
                yield error  # a worker's own exceptions come out with its traceback in the message
                return
            if None in rows and not start.rest:
                yield Ended()
                return
            if None in rows and rest.read <= step * self._share.global_batch:
                return
            yield self._batch(rows, cursors)

    def _rows(self, stream: int, start: DataPosition) -> StreamRows:
        mixture = None
        if self._weights is not None:
            mixture = Mixture(self._weights, start.streams.before(start.weighted_since, stream))
        cursor = start.cursors.get(stream, Cursor())
        return StreamRows(self._parts, mixture, stream, start.streams.count, cursor, epochs=self._epochs)

    def _batch(self, rows: list[Row | None], cursors: dict[int, Cursor]) -> StepBatch:
        shape = len(rows), self._seq_len
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        positions, lengths = np.tile(np.arange(self._seq_len), (len(rows), 1)), []
        for number, row in enumerate(rows):
            if row is not None:
                window, n = row.window, len(row.window.positions)
                tokens[number, :n], labels[number, :n] = window.inputs, window.labels
                positions[number, :n] = window.positions
                positions[number, n:] = np.arange(self._seq_len - n)
                lengths.append((row.source, n))
        long = [part.take_long() for part in self._parts]
        return StepBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(positions),
            torch.from_numpy(labels),
            cursors,
            lengths,
            long,
        )
