"""Which documents each sequence of a run is cut from, whatever the number of ranks; and the position that a run has come to.

The documents are divided among readers when a run begins, each an iterator over documents of its own. The sequences of the
run have indices: a global batch of G has 0 to G - 1, the next has G to 2G - 1. The index alone says which reader a sequence
comes from, and how many come from it before. So the number of ranks may change between two steps: a rank takes its slice of
each global batch, and opens the readers which that needs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class SourcePosition(NamedTuple):
    """Where the next sequence of a source begins."""

    epoch: int = 0
    document: Any = None
    """The source's own position, a JSON value; None is the epoch's first document."""
    offset: int = 0
    """The token in that document; under best fit, the sequence among those that are filled together."""
    digest: str = ""
    """Of the epoch's documents up to that one; "" if it is not known."""
    ahead: tuple[Any, str] | None = None
    """Under best fit: the last document that the sequence was packed from, and the digest up to there."""
    packed: Sequence[tuple[int, int]] = ()
    """Under best fit: sequence lengths and offsets by which they were packed before the job's `seq_len` changed."""


class ReaderPosition(NamedTuple):
    """How far a reader has come."""

    sequences: int = 0
    """How many it has given."""
    sources: tuple[SourcePosition, ...] = ()
    """Where it goes on in each source; () at the beginning."""


@dataclass(frozen=True)
class Readers:
    """How many readers there are, and how many sequences each gives before it is the next one's turn."""

    count: int
    in_a_row: int = 1

    def locate(self, sequence: int) -> tuple[int, int]:
        """Return the reader that gives a sequence, and how many that reader gives before it."""
        turn, left = divmod(sequence, self.count * self.in_a_row)
        reader, at = divmod(left, self.in_a_row)
        return reader, turn * self.in_a_row + at

    def before(self, sequence: int, reader: int) -> int:
        """Return how many of the sequences before `sequence` come from `reader`."""
        turn, left = divmod(sequence, self.count * self.in_a_row)
        return turn * self.in_a_row + min(max(left - reader * self.in_a_row, 0), self.in_a_row)


@dataclass(frozen=True)
class BatchSlice:
    """A data-parallel rank's slice of each global batch: `size` consecutive sequences."""

    size: int
    rank: int
    ranks: int
    workers: int = 1
    """Loader workers of the rank, which take global batches in turn; at least 1."""

    @property
    def global_batch(self) -> int:
        """Sequences in a step, over all ranks."""
        return self.size * self.ranks

    def of(self, start: int, step: int) -> range:
        """Return the indices of this rank's sequences in step `step`, from 0, after sequence `start`."""
        first = start + step * self.global_batch + self.rank * self.size
        return range(first, first + self.size)


def divide(choose: Callable[[Sequence[int]], int], batch_slice: BatchSlice) -> Readers:
    """Divide documents so that no two ranks, and no two workers, open the same reader, if there are enough documents.

    At best each sequence of a global batch has a reader of its own, and each worker other readers.

    Args:
        choose: picks the number of readers from those that would do, best first; or 1, where none does.
        batch_slice: that of any rank of the job that begins.
    """
    slots = batch_slice.global_batch * batch_slice.workers
    counts = [slots // n for n in range(1, batch_slice.size + 1) if batch_slice.size % n == 0]
    count = choose(counts)
    return Readers(count, slots // count)


@dataclass(frozen=True)
class DataPosition:
    """How far a run has read: the `sequences` that it has used, and where each reader goes on."""

    readers: Readers
    sequences: int = 0
    by_reader: Mapping[int, ReaderPosition] = field(default_factory=dict)
    """Of the readers that have begun."""
    weighted_since: int = 0
    """The sequence from which on sources are taken by the weights of today."""
    rest: bool = False
    """A reader is exhausted: the others are read one after another, from `by_reader` on."""

    def to_json(self) -> dict[str, Any]:
        """Return a dict for `json.dumps`; its keys are those of earlier releases."""
        return {
            "streams": self.readers.count,
            "in_a_row": self.readers.in_a_row,
            "sequences": self.sequences,
            "cursors": dict(self.by_reader),
            "weighted_since": self.weighted_since,
            "rest": self.rest,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DataPosition":
        """Return the position that `to_json` wrote down."""
        by_reader = {
            int(reader): ReaderPosition(sequences, tuple(SourcePosition(*source) for source in sources))
            for reader, (sequences, sources) in values["cursors"].items()
        }
        readers = Readers(values["streams"], values["in_a_row"])
        return cls(readers, values["sequences"], by_reader, values["weighted_since"], values["rest"])


def source_of(sequence: int, weights: Sequence[float]) -> int:
    """Return the index of the source that a sequence is from: arithmetic, the same on every rank.

    The first source gets its weight's fraction of all sequences, evenly spread; the second its fraction of the others, and
    so on. So weights are fractions of the sequences, however long the documents of a source are.
    """
    for source, weight in enumerate(weights):
        fraction = weight / sum(weights[source:]) if weight else 0.0
        before = math.floor(sequence * fraction)
        if math.floor((sequence + 1) * fraction) > before:
            return source
        sequence -= before
    raise ValueError("no source has a weight")


def merged(positions: Iterable[DataPosition]) -> DataPosition:
    """Return the position of a run, merged from those of its ranks, which each know the readers that they have opened."""
    first, *others = positions
    by_reader = dict(first.by_reader)
    for other in others:
        for reader, position in other.by_reader.items():
            if reader not in by_reader or by_reader[reader].sequences < position.sequences:
                by_reader[reader] = position
    return replace(first, by_reader=by_reader)
