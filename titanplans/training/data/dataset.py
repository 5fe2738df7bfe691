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
from titanplans.training.data.mixture import Mixture, PackedSource, Row, StreamRows
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
    """In place of a share: a source was read to its end."""


class PackedText(IterableDataset):
    """The shares of one rank, one after another; a loader's worker makes every n-th.

    Args:
        parts: the sources.
        seq_len: tokens in a row.
        share: this rank's.
        start: where the next `iter` begins.
        weights: of the sources, in a run that goes on until it is ended; None for one pass over one stream, in which every
            token is predicted once on one rank, and the last global batch is filled up with ignored labels.
        repeat: a source begins anew at its end; else the run is over there.
    """

    def __init__(
        self,
        parts: Sequence[PackedSource],
        seq_len: int,
        share: BatchSlice,
        start: DataPosition,
        *,
        weights: Sequence[float] | None,
        repeat: bool = True,
    ) -> None:
        self._parts, self._seq_len, self._share = parts, seq_len, share
        self._weights, self._infinite = weights, weights is not None and repeat
        self.beginning = self.start = start

    def __iter__(self) -> Iterator[StepBatch | DataError | Ended]:
        start, self.start = self.start, self.beginning
        worker = get_worker_info()
        return self._batches(start, worker.id if worker is not None else 0)

    def _batches(self, start: DataPosition, worker: int) -> Iterator[StepBatch | DataError | Ended]:
        readers: dict[int, StreamRows] = {}
        for step in itertools.count(worker, self._share.workers):
            rows, opened = [], {}
            try:
                for sequence in self._share.of(start.sequences, step):
                    stream, number = start.streams.place(sequence)
                    if stream not in readers:
                        readers[stream] = self._rows(stream, start)
                    rows.append(readers[stream].row(number))
                    opened[stream] = readers[stream]
            except DataError as error:
                yield error  # a worker's own exceptions come out with its traceback in the message
                return
            if None in rows and self._weights is not None:
                yield Ended()
                return
            if None in rows and self._is_over(start, step, readers[0]):
                return
            yield self._batch(rows, {stream: reader.cursor for stream, reader in opened.items()})

    def _is_over(self, start: DataPosition, step: int, reader: StreamRows) -> bool:
        """Whether a pass, which has one stream, came to its end before this step."""
        return start.sequences + step * self._share.global_batch >= reader.cursor.windows

    def _rows(self, stream: int, start: DataPosition) -> StreamRows:
        mixture = None
        if self._weights is not None:
            mixture = Mixture(self._weights, start.streams.before(start.weighted_since, stream))
        cursor = start.cursors.get(stream, Cursor())
        return StreamRows(self._parts, mixture, stream, start.streams.count, cursor, infinite=self._infinite)

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
