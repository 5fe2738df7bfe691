"""Which text each sequence of a run is cut from, whatever the number of ranks: arithmetic, and the place it has come to.

A corpus is divided into streams of documents when a run begins. The run's sequences are numbered through: a global batch of
G has the numbers 0 to G - 1, the next has G to 2G - 1. The number alone says which window of which stream a sequence is. So
ranks may change between two steps: a rank takes its part of each global batch, and opens the streams that this needs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple


class SourcePlace(NamedTuple):
    """Where the next window of a source begins."""

    epoch: int = 0
    document: Any = None
    """The source's own position, a JSON value; None is the epoch's first document."""
    offset: int = 0
    """The token in that document; of whole documents packed together, the row."""
    digest: str = ""
    """Of the epoch's documents up to that one; "" if it is not known."""
    ahead: tuple[Any, str] | None = None
    """Of whole documents packed together: the last one that the row was packed from, and the digest up to there."""
    packed: Sequence[tuple[int, int]] = ()
    """Of the same: row lengths and offsets by which they were packed before the job's `seq_len` changed."""


class Cursor(NamedTuple):
    """How far a stream has been read."""

    windows: int = 0
    places: tuple[SourcePlace, ...] = ()
    """Of each source; () at the beginning."""


@dataclass(frozen=True)
class Streams:
    """How many streams there are, and how many windows in a row each gives before the next one's turn."""

    count: int
    in_a_row: int = 1

    def place(self, sequence: int) -> tuple[int, int]:
        """Return the stream of a sequence, and the number of its window in that stream, both from 0."""
        turn, left = divmod(sequence, self.count * self.in_a_row)
        stream, window = divmod(left, self.in_a_row)
        return stream, turn * self.in_a_row + window

    def before(self, sequence: int, stream: int) -> int:
        """Return how many windows of `stream` come before a sequence."""
        turn, left = divmod(sequence, self.count * self.in_a_row)
        return turn * self.in_a_row + min(max(left - stream * self.in_a_row, 0), self.in_a_row)


@dataclass(frozen=True)
class BatchSlice:
    """A data-parallel rank's part of each global batch: `size` consecutive sequences."""

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
        """Return the numbers of this rank's sequences in step `step`, from 0, after sequence `start`."""
        first = start + step * self.global_batch + self.rank * self.size
        return range(first, first + self.size)


def divide(choose: Callable[[Sequence[int]], int], share: BatchSlice) -> Streams:
    """Divide a corpus so that no two ranks, and no two workers, open the same stream, if it has enough documents.

    At best each sequence of a global batch has a stream of its own, and each worker other streams.

    Args:
        choose: picks the number of streams from those that would do, best first; or 1, where none does.
        share: that of any rank of the job that begins.
    """
    slots = share.global_batch * share.workers
    counts = [slots // n for n in range(1, share.size + 1) if share.size % n == 0]
    count = choose(counts)
    return Streams(count, slots // count)


@dataclass(frozen=True)
class DataPosition:
    """How far a run has read: the `sequences` that it has used, and where each stream goes on."""

    streams: Streams
    sequences: int = 0
    cursors: Mapping[int, Cursor] = field(default_factory=dict)
    """Of streams that were not begun there is none."""
    weighted_since: int = 0
    """The sequence from which on sources are taken by the weights of today."""
    rest: bool = False
    """A stream has ended: the rest of them is read one after another, from the cursors on."""

    def to_json(self) -> dict[str, Any]:
        """Return a dict for `json.dumps`."""
        return asdict(self) | {"streams": self.streams.count, "in_a_row": self.streams.in_a_row}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DataPosition":
        """Return the place that `to_json` wrote down."""
        cursors = {
            int(stream): Cursor(windows, tuple(SourcePlace(*place) for place in places))
            for stream, (windows, places) in values["cursors"].items()
        }
        streams = Streams(values["streams"], values["in_a_row"])
        return cls(streams, values["sequences"], cursors, values["weighted_since"], values["rest"])


def source_of(row: int, weights: Sequence[float]) -> int:
    """Return the number of the source that a row is from: arithmetic, the same on every rank.

    The first source has its share of all rows, evenly spread; the second its share of the others, and so on. So weights
    are shares of the rows, however long the documents of a source are.
    """
    for source, weight in enumerate(weights):
        share = weight / sum(weights[source:]) if weight else 0.0
        before = math.floor(row * share)
        if math.floor((row + 1) * share) > before:
            return source
        row -= before
    raise ValueError("no source has a weight")


def merged(places: Iterable[DataPosition]) -> DataPosition:
    """Return the position of a run, merged from those of its ranks, which each know the streams that they have read."""
    first, *others = places
    cursors = dict(first.cursors)
    for place in others:
        for stream, cursor in place.cursors.items():
            if stream not in cursors or cursors[stream].windows < cursor.windows:
                cursors[stream] = cursor
    return replace(first, cursors=cursors)
