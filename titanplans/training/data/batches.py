"""The sequences of one data-parallel rank, step by step, as an iterable that can begin at any position of a run.

No token is ever saved: a resumed run tokenises the documents again in which a reader stopped.
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

from titanplans.errors import DataError
from titanplans.loss import IGNORED
from titanplans.split.objects import gather_objects
from titanplans.training.data.packed_source import PackedSource
from titanplans.training.data.packing import TokenSequence
from titanplans.training.data.positions import (
    BatchSlice,
    DataPosition,
    ReaderPosition,
    SourcePosition,
    source_of,
)


class ReadSequence(NamedTuple):
    """A sequence, where it is from, and where its reader goes on after it."""

    tokens: TokenSequence
    source: int
    reader: int
    after: ReaderPosition


class StepBatch(NamedTuple):
    """A rank's slice of one global batch, each tensor `[slice, seq_len]` int64."""

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    by_reader: dict[int, ReaderPosition]
    """Where the readers go on that it is from."""
    lengths: list[tuple[int, int]]
    """Of each sequence the index of its source, and its tokens without padding."""
    long: list[int]
    """Documents of each source that were longer than a sequence since the batch before, and cut or left out."""


class Exhausted(NamedTuple):
    """Sentinel in place of a batch when a reader is exhausted; the remaining readers are then read in turn."""


class StepBatches(IterableDataset):
    """The batches of one rank, one after another; a loader's worker makes every n-th.

    Args:
        start: where the next `iter` begins.
        weights: of the sources; None: one after another.
        epochs: of the data, after which a last global batch is filled up with ignored labels; None: they are repeated.
    """

    def __init__(
        self,
        sources: Sequence[PackedSource],
        seq_len: int,
        batch_slice: BatchSlice,
        start: DataPosition,
        *,
        weights: Sequence[float] | None,
        epochs: int | None = None,
    ) -> None:
        self._sources, self._seq_len, self._slice = sources, seq_len, batch_slice
        self._weights, self._epochs = weights, epochs
        self.beginning = self.start = start

    def __iter__(self) -> Iterator[StepBatch | DataError | Exhausted]:
        start, self.start = self.start, self.beginning
        worker = get_worker_info()
        return _with_errors((self._rest if start.rest else self._batches)(start, worker.id if worker else 0))

    def _batches(self, start: DataPosition, worker: int) -> Iterator[StepBatch | Exhausted]:
        readers: dict[int, Iterator[ReadSequence]] = {}
        for step in itertools.count(worker, self._slice.workers):
            sequences = []
            for index in self._slice.of(start.sequences, step):
                reader, before = start.readers.locate(index)
                if reader not in readers:
                    readers[reader] = self._read(reader, start)
                sequence = next((each for each in readers[reader] if each.after.sequences > before), None)
                if sequence is None:
                    yield Exhausted()
                    return
                sequences.append(sequence)
            yield self._batch(sequences, {sequence.reader: sequence.after for sequence in sequences})

    def _rest(self, start: DataPosition, worker: int) -> Iterator[StepBatch]:
        """Yield the rest of all readers, one after another: each worker reads all of it."""
        rank, by_reader = self._slice, dict[int, ReaderPosition]()
        sequences = itertools.chain.from_iterable(
            self._read(reader, start) for reader in range(start.readers.count)
        )
        for step in itertools.count():
            global_batch = list(itertools.islice(sequences, rank.global_batch))
            if not global_batch:
                return
            by_reader |= {sequence.reader: sequence.after for sequence in global_batch}
            if step % rank.workers == worker:
                yield self._batch(global_batch[rank.rank * rank.size :][: rank.size], dict(by_reader))

    def _read(self, reader: int, start: DataPosition) -> Iterator[ReadSequence]:
        """Yield the sequences of a reader up to the end of all sources."""
        position = start.by_reader.get(reader, ReaderPosition())
        positions = list(position.sources or (SourcePosition(),) * len(self._sources))
        sequences = [
            source.sequences(reader, start.readers.count, begin, epochs=self._epochs)
            for source, begin in zip(self._sources, positions, strict=True)
        ]
        weights = None if self._weights is None else list(self._weights)
        # Readers are out of step, so that each batch is mixed.
        turn = reader - start.readers.before(start.weighted_since, reader)
        left = [index for index in range(len(positions)) if weights is None or weights[index]]
        for index in itertools.count(position.sequences):
            source, tokens = -1, None
            while tokens is None:
                if not left:
                    return
                source = left[0] if weights is None else source_of(turn + index, weights)
                if (tokens := next(sequences[source], None)) is None:
                    left.remove(source)
                    weights = weights and [w * (at in left) for at, w in enumerate(weights)]
            positions[source] = _position_after(tokens)
            yield ReadSequence(tokens, source, reader, ReaderPosition(index + 1, tuple(positions)))

    def _batch(self, sequences: list[ReadSequence], by_reader: dict[int, ReaderPosition]) -> StepBatch:
        """Return a batch of `sequences`, or of fewer at the end of the data, where it is filled up."""
        shape = self._slice.size, self._seq_len
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.tile(np.arange(self._seq_len), (self._slice.size, 1))
        for at, (sequence, *_) in enumerate(sequences):
            n = len(sequence.positions)
            tokens[at, :n], labels[at, :n] = sequence.inputs, sequence.labels
            positions[at, :n] = sequence.positions
            positions[at, n:] = np.arange(self._seq_len - n)
        return StepBatch(
            *map(torch.from_numpy, (tokens, positions, labels)),
            by_reader=by_reader,
            lengths=[(sequence.source, len(sequence.tokens.positions)) for sequence in sequences],
            long=[source.take_long() for source in self._sources],
        )


def _with_errors(
    batches: Iterator[StepBatch | Exhausted],
) -> Iterator[StepBatch | DataError | Exhausted]:
    """Yield an error as the last batch: a worker's own exceptions come out with its traceback in the message."""
    try:
        yield from batches
    except DataError as error:
        yield error


def _position_after(sequence: TokenSequence) -> SourcePosition:
    """Return where the next sequence begins; `ahead` matches no document where sequences were packed across epochs."""
    (epoch, document, digest), last = sequence.next_document, sequence.last_read
    ahead = None
    if last is not None:
        ahead = (json.dumps(last[1]), last[2]) if last[0] == epoch else ("", "")
    return SourcePosition(epoch, document, sequence.next_offset, digest, ahead, sequence.packed)


class DataMetrics:
    """What a rank has read of the sources with these names since it was last asked."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._counts = names, Counter[str]()

    def count(self, batch: StepBatch) -> None:
        """Add what the rank has read of a step."""
        self._counts["tokens and padding"] += batch.tokens.numel()
        for source, tokens in batch.lengths:
            self._counts[f"tokens/{self._names[source]}"] += tokens
        for source, count in enumerate(batch.long):
            self._counts[f"long_documents/{self._names[source]}"] += count

    def take(self, ranks: int) -> dict[str, float]:
        """Return what all ranks have read, `ranks` of them different data. Collective."""
        every = gather_objects(self._counts)
        self._counts = Counter()
        counts = {name: n * ranks // len(every) for name, n in sum(every, Counter[str]()).items()}
        tokens = {f"data/tokens/{name}": counts.get(f"tokens/{name}", 0) for name in self._names}
        long = {f"data/{name}": n for name, n in counts.items() if name.startswith("long_documents/")}
        padding = 100 * (1 - sum(tokens.values()) / max(counts.get("tokens and padding", 0), 1))
        return {"data/padding(%)": padding, **tokens, **long}


class AnyRank:
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
