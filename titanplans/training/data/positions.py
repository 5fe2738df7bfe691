"""The reader of each sequence of a run, for any number of ranks, and a run's position in the data.

When a run begins, its documents are divided among readers. A reader is an iterator over its documents. The sequences of
the run are numbered: the first global batch of G sequences has indices 0 to G - 1, the next one G to 2G - 1. The index of a
sequence determines its reader, and how many sequences that reader yields before it. So the number of ranks may change
between two steps: a rank takes its slice of each global batch and opens the readers of that slice.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class SourcePosition(NamedTuple):
    """Where the next sequence of a source begins."""

    epoch: int = 0
    document: Any = None
    """The position of a document in the source, a JSON value; None: the first document of the epoch."""
    offset: int = 0
    """The index of a token in that document; for best fit, see the argument `offset` of `packing.pack_best_fit`."""
    digest: str = ""
    """Digest of the epoch's documents up to `document`; "" if unknown."""
    ahead: tuple[Any, str] | None = None
    """For best fit: the position of the last document that was read for the group of sequences, with its digest."""
    packed: Sequence[tuple[int, int]] = ()
    """For best fit: the (sequence length, offset) pairs with which documents were packed before `seq_len` changed."""


class ReaderPosition(NamedTuple):
    """The position of a reader."""

    sequences: int = 0
    """The number of sequences that the reader has yielded."""
    sources: tuple[SourcePosition, ...] = ()
    """The reader's position in each source; () at the beginning."""


@dataclass(frozen=True)
class Readers:
    """How the sequences of a run are distributed over readers, which take turns."""

    count: int
    """Number of readers."""
    sequences_per_turn: int = 1
    """Number of consecutive sequences that come from one reader before the next reader's turn."""

    def locate(self, sequence: int) -> tuple[int, int]:
        """Return the reader of a sequence, and how many sequences that reader yields before it."""
        turn, remainder = divmod(sequence, self.count * self.sequences_per_turn)
        reader, index = divmod(remainder, self.sequences_per_turn)
        return reader, turn * self.sequences_per_turn + index

    def before(self, sequence: int, reader: int) -> int:
        """Return how many of the sequences before `sequence` come from `reader`."""
        turn, remainder = divmod(sequence, self.count * self.sequences_per_turn)
        in_this_turn = max(remainder - reader * self.sequences_per_turn, 0)
        return turn * self.sequences_per_turn + min(in_this_turn, self.sequences_per_turn)


@dataclass(frozen=True)
class BatchSlice:
    """A data-parallel rank's slice of each global batch: `size` consecutive sequences."""

    size: int
    rank: int
    ranks: int
    workers: int = 1
    """Number of the rank's loader workers, which take global batches in turn; at least 1."""

    @property
    def global_batch(self) -> int:
        """Sequences in a step, over all ranks."""
        return self.size * self.ranks

    def of(self, start: int, step: int) -> range:
        """Return the indices of this rank's sequences in step `step`, counted from 0 at sequence `start`."""
        first = start + step * self.global_batch + self.rank * self.size
        return range(first, first + self.size)


def divide(choose: Callable[[Sequence[int]], int], batch_slice: BatchSlice) -> Readers:
    """Choose the number of readers so that, with enough documents, no two ranks and no two workers open the same reader.

    Ideally each sequence of a global batch has its own reader, and each worker has different readers.

    Args:
        choose: a function that is called with possible numbers of readers, the best first; it returns one of them, or 1.
        batch_slice: the slice of any rank of the job that begins.
    """
    slots = batch_slice.global_batch * batch_slice.workers
    counts = [slots // n for n in range(1, batch_slice.size + 1) if batch_slice.size % n == 0]
    count = choose(counts)
    return Readers(count, slots // count)


@dataclass(frozen=True)
class DataPosition:
    """The position of a run in the data."""

    readers: Readers
    sequences: int = 0
    """The number of sequences that the run has used."""
    by_reader: Mapping[int, ReaderPosition] = field(default_factory=dict)
    """Positions of the readers that have been opened."""
    weighted_since: int = 0
    """The index of the first sequence to which the current weights of the sources apply."""
    is_sequential: bool = False
    """Whether a reader is exhausted, so that the remaining readers are read one after another, from their positions on."""

    def to_json(self) -> dict[str, Any]:
        """Return a dict for `json.dumps`."""
        # Checkpoints have these keys, which are older than the names of the fields.
        return {
            "streams": self.readers.count,
            "in_a_row": self.readers.sequences_per_turn,
            "sequences": self.sequences,
            "cursors": dict(self.by_reader),
            "weighted_since": self.weighted_since,
            "rest": self.is_sequential,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DataPosition":
        """Return the position that `to_json` has converted to a dict."""
        by_reader = {
            int(reader): ReaderPosition(sequences, tuple(SourcePosition(*source) for source in sources))
            for reader, (sequences, sources) in values["cursors"].items()
        }
        readers = Readers(values["streams"], values["in_a_row"])
        return cls(readers, values["sequences"], by_reader, values["weighted_since"], values["rest"])


def source_of(sequence: int, weights: Sequence[float]) -> int:
    """Return the index of the source that a sequence comes from. It depends only on the arguments, so all ranks agree.

    The first source gets its fraction (weight / sum of weights) of all sequences, evenly spaced; the second gets its
    fraction of the remaining ones, and so on. Weights are fractions of sequences, however long a source's documents are.
    """
    for source, weight in enumerate(weights):
        fraction = weight / sum(weights[source:]) if weight else 0.0
        before = math.floor(sequence * fraction)
        if math.floor((sequence + 1) * fraction) > before:
            return source
        sequence -= before
    raise ValueError("no source has a weight")


def merged(positions: Iterable[DataPosition]) -> DataPosition:
    """Merge the positions of a run's ranks, each of which knows the readers that it has opened."""
    first, *others = positions
    by_reader = dict(first.by_reader)
    for other in others:
        for reader, position in other.by_reader.items():
            if reader not in by_reader or by_reader[reader].sequences < position.sequences:
                by_reader[reader] = position
    return replace(first, by_reader=by_reader)
