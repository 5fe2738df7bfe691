"""How one parameter lies on the mesh, which of its rows a rank reads, and how the residual stream lies.

Where each rank uses one even shard, a parameter is stored so: `Shard`. Of a packed parameter (queries, keys and values in
one weight), or one whose heads ranks share, a rank uses other rows. It is stored in a way that DTensor can express, so
that `full_tensor`, FSDP2, optimizers and checkpoints see its true values in their true order, and a rank selects its rows
when it reads it:

    stored                    a rank's rows come     gradient
    Replicate                 from its own copy      Partial
    Shard(another dimension)  by an all-to-all       by an all-to-all, back
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


class StreamLayout(NamedTuple):
    """How the residual stream [..., sequence, hidden] lies between regions, on the ranks of tensor parallelism."""

    sequence_dim: int = 1
    sharded: bool = True
    """Over the sequence; else every rank has the full stream."""

    @property
    def dim(self) -> int | None:
        """The dimension that is sharded; None: every rank has the full stream."""
        return self.sequence_dim if self.sharded else None

    @property
    def placement(self) -> Placement:
        """How the hidden states lie on the mesh."""
        return Replicate() if self.dim is None else Shard(self.dim)

    @property
    def gradient(self) -> Placement:
        """How the gradient of a replicated parameter on the stream lies on the mesh."""
        return Replicate() if self.dim is None else Partial()

    def __repr__(self) -> str:
        return repr(self.placement)


class Shared(NamedTuple):
    """A section of a packed parameter whose heads neighbouring ranks share where there are fewer of them than ranks.

    One head, which all ranks share, is a section of which each rank reads all.
    """

    size: int
    """Rows of the section."""
    heads: int = 1
    """Heads (groups, experts) that they count."""


Section = int | Shared
"""Rows of a packed parameter that belong together: a number of rows that the ranks share out, or rows that they share."""


class Run(NamedTuple):
    """A contiguous range of rows, divided into slices of `size` rows in the order of the ranks; the last may be shorter.

    Two heads of 4 rows over 4 ranks: Run(first=0, size=4, end=8, sharing=2). Ranks 0 and 1 take rows 0 to 3, 2 and 3 rows 4
    to 7.
    """

    first: int
    """The first row of rank 0."""
    size: int
    """Rows of a slice; the last one may have fewer, as of `torch.chunk`."""
    end: int
    """The row after the last rank's."""
    sharing: int = 1
    """So many neighbouring ranks take the same slice."""

    @property
    def even(self) -> bool:
        """Whether each rank has `size` rows."""
        return self.size == 0 or (self.end - self.first) % self.size == 0

    def at(self, rank: int) -> int:
        """Return the first row of `rank`."""
        return self.first + rank // self.sharing * self.size

    def of(self, rank: int) -> int:
        """Return how many rows `rank` has: only the last may have fewer, and none has 0."""
        if self.even:
            return self.size
        last, rest = divmod(self.end - self.first, self.size)
        return self.size - rank // self.sharing // last * (self.size - rest)


class Rows(NamedTuple):
    """What a rank reads of one dimension of a parameter."""

    dim: int
    runs: tuple[Run, ...]


class Layout(NamedTuple):
    """How one parameter lies on the TP mesh, and how its local gradient does."""

    placement: Placement
    gradient: Placement
    deferred: bool = False
    """The module sees None: its style adds it to the output (`add_deferred_bias`)."""
    rows: Rows | None = None
    """What a rank reads; None: its local tensor."""
    divided_by: int = 1
    """Every rank adds it before the all-reduce, so each adds it divided by the number of ranks."""

    @property
    def is_collective(self) -> bool:
        """Whether a rank's local tensor comes from all ranks, which ask for it at the same time."""
        return self.rows is not None and isinstance(self.placement, Shard)


def rows_of(dim: int, sections: Sequence[Section], degree: int) -> Rows:
    """Return the rows that each of `degree` ranks reads of a dimension of `sections`, which the degree suits."""
    runs, first = [], 0
    for section in sections:
        size, heads = (section, degree) if isinstance(section, int) else section
        sharing = max(1, degree // heads)
        runs.append(Run(first, -(size * sharing // -degree), first + size, sharing))
        first += size
    return Rows(dim, tuple(runs))


def rows_read(layout: Layout, shape: Sequence[int], ranks: int) -> Rows | None:
    """Return the rows that each of `ranks` ranks reads of a full tensor of `shape`; None: all of it."""
    if layout.rows is not None or not isinstance(layout.placement, Shard):
        return layout.rows
    return rows_of(layout.placement.dim, [shape[layout.placement.dim]], ranks)


def shard_size(length: int, ranks: int) -> int:
    """Return how much of `length` a rank holds, the last ones perhaps less: as `torch.chunk` and DTensor."""
    return -(length // -ranks)


def next_multiple(value: int, factor: int) -> int:
    """Return the least multiple of `factor` that is at least `value`."""
    return shard_size(value, factor) * factor
