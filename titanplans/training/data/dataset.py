"""The rows of one data-parallel rank, as an iterable that can begin at any place of a run; and figures of them for the log.

No token is ever saved: a resumed run tokenises the documents again in which a stream stopped.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.loss import IGNORE_INDEX

from titanplans.errors import DataError
from titanplans.split.objects import of_all
from titanplans.training.data.mixture import PackedSource
from titanplans.training.data.packing import Window
from titanplans.training.data.streams import BatchSlice, Cursor, DataPosition, SourcePlace, source_of


class Row(NamedTuple):
    """A row of a stream."""

    window: Window
    source: int
    stream: int
    cursor: Cursor
    """Where the stream goes on behind it."""


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
    """Takes the place of a share when a stream has ended: then the others are read one after another."""


class PackedText(IterableDataset):
    """The shares of one rank, one after another; a loader's worker makes every n-th.

    Args:
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
        return _with_errors((self._rest if start.rest else self._batches)(start, worker.id if worker else 0))

    def _batches(self, start: DataPosition, worker: int) -> Iterator[StepBatch | Ended]:
        streams: dict[int, Iterator[Row]] = {}
        for step in itertools.count(worker, self._share.workers):
            rows = []
            for sequence in self._share.of(start.sequences, step):
                stream, number = start.streams.place(sequence)
                if stream not in streams:
                    streams[stream] = self._rows(stream, start)
                row = next((row for row in streams[stream] if row.cursor.windows > number), None)
                if row is None:
                    yield Ended()
                    return
                rows.append(row)
            yield self._batch(rows, {row.stream: row.cursor for row in rows})

    def _rest(self, start: DataPosition, worker: int) -> Iterator[StepBatch]:
        """The rest of all streams, one after another: each worker reads all of it."""
        share, cursors = self._share, dict[int, Cursor]()
        rows = itertools.chain.from_iterable(
            self._rows(stream, start) for stream in range(start.streams.count)
        )
        for step in itertools.count():
            batch = list(itertools.islice(rows, share.global_batch))
            if not batch:
                return
            cursors |= {row.stream: row.cursor for row in batch}
            if step % share.workers == worker:
                yield self._batch(batch[share.rank * share.size :][: share.size], dict(cursors))

    def _rows(self, stream: int, start: DataPosition) -> Iterator[Row]:
        """Yield the rows of a stream up to the end of all sources."""
        cursor = start.cursors.get(stream, Cursor())
        places = list(cursor.places or (SourcePlace(),) * len(self._parts))
        windows = [
            part.windows(stream, start.streams.count, place, epochs=self._epochs)
            for part, place in zip(self._parts, places, strict=True)
        ]
        weights = None if self._weights is None else list(self._weights)
        # Streams are out of step, so that each batch is mixed.
        turn = stream - start.streams.before(start.weighted_since, stream)
        left = [number for number in range(len(places)) if weights is None or weights[number]]
        for row in itertools.count(cursor.windows):
            source, window = -1, None
            while window is None:
                if not left:
                    return
                source = left[0] if weights is None else source_of(turn + row, weights)
                if (window := next(windows[source], None)) is None:
                    left.remove(source)
                    weights = weights and [w * (number in left) for number, w in enumerate(weights)]
            places[source] = _place(window)
            yield Row(window, source, stream, Cursor(row + 1, tuple(places)))

    def _batch(self, rows: list[Row], cursors: dict[int, Cursor]) -> StepBatch:
        """A share of `rows`, or fewer at the end of the data, where it is filled up."""
        shape = self._share.size, self._seq_len
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        positions = np.tile(np.arange(self._seq_len), (self._share.size, 1))
        for number, (window, *_) in enumerate(rows):
            n = len(window.positions)
            tokens[number, :n], labels[number, :n] = window.inputs, window.labels
            positions[number, :n] = window.positions
            positions[number, n:] = np.arange(self._seq_len - n)
        return StepBatch(
            *map(torch.from_numpy, (tokens, positions, labels)),
            cursors=cursors,
            lengths=[(row.source, len(row.window.positions)) for row in rows],
            long=[part.take_long() for part in self._parts],
        )


def _with_errors(batches: Iterator[StepBatch | Ended]) -> Iterator[StepBatch | DataError | Ended]:
    """Yield an error as the last share: a worker's own exceptions come out with its traceback in the message."""
    try:
        yield from batches
    except DataError as error:
        yield error


def _place(window: Window) -> SourcePlace:
    """Return where the next row begins; `ahead` matches no document where rows were packed across epochs."""
    (epoch, document, digest), last = window.next_document, window.last_read
    ahead = None
    if last is not None:
        ahead = (json.dumps(last[1]), last[2]) if last[0] == epoch else ("", "")
    return SourcePlace(epoch, document, window.next_offset, digest, ahead, window.packed)


class Figures:
    """What a rank has read of the sources with these names since it was last asked."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._found = names, Counter[str]()

    def count(self, share: StepBatch) -> None:
        """Add what the rank has read of a step."""
        self._found["places"] += share.tokens.numel()
        for source, tokens in share.lengths:
            self._found[f"tokens/{self._names[source]}"] += tokens
        for source, number in enumerate(share.long):
            self._found[f"long_documents/{self._names[source]}"] += number

    def take(self, readers: int) -> dict[str, float]:
        """Return what all ranks have read, `readers` of them different data. Collective."""
        every = of_all(self._found)
        self._found = Counter()
        of = {name: n * readers // len(every) for name, n in sum(every, Counter[str]()).items()}
        tokens = {f"data/tokens/{name}": of.get(f"tokens/{name}", 0) for name in self._names}
        long = {f"data/{name}": n for name, n in of.items() if name.startswith("long_documents/")}
        padding = 100 * (1 - sum(tokens.values()) / max(of.get("places", 0), 1))
        return {"data/padding(%)": padding, **tokens, **long}


class Flag:
    """Combines a yes or no of each rank, without waiting for accelerators. Collective."""

    def __init__(self) -> None:
        self._asks = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if self._asks and dist.get_backend() != "gloo" else None

    def __call__(self, own: bool) -> bool:
        """Return whether any rank says yes."""
        flag = torch.tensor(own, dtype=torch.int32)
        if self._asks:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)
