"""`StepBatches`: the batches of one data-parallel rank, step by step, from any position of a run; and their metrics.

A position holds no tokens. A resumed run tokenises again the documents in which its readers stopped.
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
    """A sequence, the indices of its source and reader, and the reader's position after it."""

    tokens: TokenSequence
    source: int
    reader: int
    after: ReaderPosition


class StepBatch(NamedTuple):
    """A rank's slice of one global batch. Each tensor is `[slice, seq_len]` int64."""

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    by_reader: dict[int, ReaderPosition]
    """The position of each reader that the batch was read from, after this batch."""
    lengths: list[tuple[int, int]]
    """For each sequence, the index of its source and the number of its tokens without padding."""
    long: list[int]
    """For each source, how many documents longer than a sequence were cut or dropped since the last batch."""


class Exhausted(NamedTuple):
    """Sentinel in place of a batch when a reader is exhausted; the remaining readers are then read in turn."""


class StepBatches(IterableDataset):
    """Iterates over the batches of one rank. Each of a DataLoader's n workers yields every n-th batch.

    Args:
        sources: the sources.
        seq_len: tokens per sequence.
        batch_slice: the rank's slice of a global batch.
        start: the position at which the next `iter` begins.
        weights: the weights of the sources in the mixture; None: the sources are read one after another.
        epochs: passes over the data, after which the last global batch is padded with ignored labels; None: unlimited.
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
        return _with_data_errors(
            (self._remaining_batches if start.is_sequential else self._batches)(
                start, worker.id if worker else 0
            )
        )

    def _batches(self, start: DataPosition, worker: int) -> Iterator[StepBatch | Exhausted]:
        readers: dict[int, Iterator[ReadSequence]] = {}
        for step in itertools.count(worker, self._slice.workers):
            sequences = []
            for index in self._slice.of(start.sequences, step):
                reader, before = start.readers.locate(index)
                if reader not in readers:
                    readers[reader] = self._sequences_of(reader, start)
                # Skip the sequences of this reader that belong to other ranks or workers.
                sequence = next(
                    (candidate for candidate in readers[reader] if candidate.after.sequences > before), None
                )
                if sequence is None:
                    yield Exhausted()
                    return
                sequences.append(sequence)
            yield self._batch(sequences, {sequence.reader: sequence.after for sequence in sequences})

    def _remaining_batches(self, start: DataPosition, worker: int) -> Iterator[StepBatch]:
        """Yield batches of the remaining sequences of all readers, one reader after another. Every worker reads all of
        them."""
        rank, by_reader = self._slice, dict[int, ReaderPosition]()
        sequences = itertools.chain.from_iterable(
            self._sequences_of(reader, start) for reader in range(start.readers.count)
        )
        for step in itertools.count():
            global_batch = list(itertools.islice(sequences, rank.global_batch))
            if not global_batch:
                return
            by_reader |= {sequence.reader: sequence.after for sequence in global_batch}
            if step % rank.workers == worker:
                yield self._batch(global_batch[rank.rank * rank.size :][: rank.size], dict(by_reader))

    def _sequences_of(self, reader: int, start: DataPosition) -> Iterator[ReadSequence]:
        """Yield the sequences of a reader until all its sources are exhausted."""
        position = start.by_reader.get(reader, ReaderPosition())
        positions = list(position.sources or (SourcePosition(),) * len(self._sources))
        sequences = [
            source.sequences(reader, start.readers.count, begin, epochs=self._epochs)
            for source, begin in zip(self._sources, positions, strict=True)
        ]
        weights = None if self._weights is None else list(self._weights)
        # Each reader begins the cycle of sources at a different index, so that every batch mixes the sources.
        shift = reader - start.readers.before(start.weighted_since, reader)
        remaining = [index for index in range(len(positions)) if weights is None or weights[index]]
        for index in itertools.count(position.sequences):
            source, tokens = -1, None
            while tokens is None:
                if not remaining:
                    return
                source = remaining[0] if weights is None else source_of(shift + index, weights)
                if (tokens := next(sequences[source], None)) is None:
                    remaining.remove(source)
                    weights = weights and [w * (i in remaining) for i, w in enumerate(weights)]
            positions[source] = _position_after(tokens)
            yield ReadSequence(tokens, source, reader, ReaderPosition(index + 1, tuple(positions)))

    def _batch(self, sequences: list[ReadSequence], by_reader: dict[int, ReaderPosition]) -> StepBatch:
        """Return a batch of `sequences`. If there are too few, as at the end of the data, the remaining sequences are
        padding."""
        shape = self._slice.size, self._seq_len
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.tile(np.arange(self._seq_len), (self._slice.size, 1))
        for i, (sequence, *_) in enumerate(sequences):
            n = len(sequence.positions)
            tokens[i, :n], labels[i, :n] = sequence.inputs, sequence.labels
            positions[i, :n] = sequence.positions
            positions[i, n:] = np.arange(self._seq_len - n)  # padding counts as another document
        return StepBatch(
            *map(torch.from_numpy, (tokens, positions, labels)),
            by_reader=by_reader,
            lengths=[(sequence.source, len(sequence.tokens.positions)) for sequence in sequences],
            long=[source.take_long() for source in self._sources],
        )


def _with_data_errors(
    batches: Iterator[StepBatch | Exhausted],
) -> Iterator[StepBatch | DataError | Exhausted]:
    """Yield a DataError as the last item instead of raising it."""
    # DataLoader would raise it in the rank with the worker's traceback as its message.
    try:
        yield from batches
    except DataError as error:
        yield error


def _position_after(sequence: TokenSequence) -> SourcePosition:
    """Return where the sequence after `sequence` begins in its source."""
    (epoch, document, digest), last = sequence.next_document, sequence.last_read
    ahead = None
    if last is not None:
        # If a group of sequences spans two epochs, changes of files can't be checked up to the group's last document. ("",
        # "") matches no document, so a change of files is then refused.
        ahead = (json.dumps(last[1]), last[2]) if last[0] == epoch else ("", "")
    return SourcePosition(epoch, document, sequence.next_offset, digest, ahead, sequence.packed)


class DataMetrics:
    """Counts the tokens, padding and long documents that a rank reads, by source name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._counts = names, Counter[str]()

    def count(self, batch: StepBatch) -> None:
        """Add the rank's batch of a step."""
        self._counts["tokens and padding"] += batch.tokens.numel()
        for source, tokens in batch.lengths:
            self._counts[f"tokens/{self._names[source]}"] += tokens
        for source, count in enumerate(batch.long):
            self._counts[f"long_documents/{self._names[source]}"] += count

    def take(self, ranks: int) -> dict[str, float]:
        """Return the metrics since the last call, over `ranks` data-parallel ranks. Collective over all ranks."""
        counts_by_rank = gather_objects(self._counts)
        self._counts = Counter()
        # TP, CP and PP ranks read the same data: count it once.
        counts = {
            name: n * ranks // len(counts_by_rank) for name, n in sum(counts_by_rank, Counter[str]()).items()
        }
        tokens = {f"data/tokens/{name}": counts.get(f"tokens/{name}", 0) for name in self._names}
        long = {f"data/{name}": n for name, n in counts.items() if name.startswith("long_documents/")}
        padding = 100 * (1 - sum(tokens.values()) / max(counts.get("tokens and padding", 0), 1))
        return {"data/padding(%)": padding, **tokens, **long}


class AnyRank:
    """Function that returns whether a condition is true on any rank. Collective."""

    def __init__(self) -> None:
        self._has_ranks = dist.is_initialized() and dist.get_world_size() > 1
        # gloo runs on the CPU. A collective of NCCL would wait for the accelerator in every step.
        needs_group = self._has_ranks and dist.get_backend() != "gloo"
        self._group = dist.new_group(backend="gloo") if needs_group else None

    def __call__(self, condition: bool) -> bool:
        """Return whether `condition` is true on any rank."""
        flag = torch.tensor(condition, dtype=torch.int32)
        if self._has_ranks:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)
