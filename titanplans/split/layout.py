"""The layout of a parameter on the mesh, the rows that a rank uses, and the layout of the residual stream."""

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


class StreamLayout(NamedTuple):
    """The layout of the residual stream [..., sequence, hidden] between regions, on the tensor-parallel ranks."""

    sequence_dim: int = 1
    sharded: bool = True
    """The sequence is sharded; False: every rank has the full stream."""

    @property
    def dim(self) -> int | None:
        """The dimension that is sharded; None: every rank has the full stream."""
        return self.sequence_dim if self.sharded else None

    @property
    def placement(self) -> Placement:
        """The placement of the hidden states."""
        return Replicate() if self.dim is None else Shard(self.dim)

    @property
    def gradient(self) -> Placement:
        """The placement of the gradient of a replicated parameter on the stream."""
        return Replicate() if self.dim is None else Partial()

    def __repr__(self) -> str:
        return repr(self.placement)


class SharedHeads(NamedTuple):
    """A section of a packed parameter. If it has fewer heads than there are ranks, neighbouring ranks share a head.

    With one head, every rank uses the full section.
    """

    size: int
    """Rows of the section."""
    heads: int = 1
    """Number of heads (groups, experts) in these rows."""


Section = int | SharedHeads
"""A section of a packed parameter. int: its rows are split over the ranks. `SharedHeads`: ranks may share its heads."""


class Run(NamedTuple):
    """A contiguous range of rows, split over the ranks in order; only the last slice may be shorter.

    Two heads of 4 rows over 4 ranks: Run(first=0, size=4, end=8, ranks_per_slice=2). Ranks 0 and 1 take rows 0 to 3,
    ranks 2 and 3 rows 4 to 7.
    """

    first: int
    """The first row of rank 0."""
    size: int
    """Rows of a slice; the last slice may have fewer, as in `torch.chunk`."""
    end: int
    """The row after the last rank's slice."""
    ranks_per_slice: int = 1
    """Number of neighbouring ranks that take the same slice."""

    @property
    def is_even(self) -> bool:
        """Whether each rank has `size` rows."""
        return self.size == 0 or (self.end - self.first) % self.size == 0

    def first_row(self, rank: int) -> int:
        """Return the first row of `rank`."""
        return self.first + rank // self.ranks_per_slice * self.size

    def row_count(self, rank: int) -> int:
        """Return the number of rows of `rank`: only the last slice may have fewer than `size`, and none is empty."""
        if self.is_even:
            return self.size
        last, remainder = divmod(self.end - self.first, self.size)
        return self.size - rank // self.ranks_per_slice // last * (self.size - remainder)


class Rows(NamedTuple):
    """The rows of one dimension of a parameter that a rank uses."""

    dim: int
    runs: tuple[Run, ...]


class Layout(NamedTuple):
    """The layout of one parameter, and of its gradient, on a 1-D mesh.

    If each rank uses one even shard, the placement is `Shard`. Of a packed parameter (queries, keys and values in one
    weight), or of a parameter with fewer heads than ranks, a rank uses rows that are no such shard. These parameters are
    stored with a placement that DTensor can express, so that `full_tensor`, FSDP2, optimizers and checkpoints see their
    values in the order of the unsplit model. A rank selects its `rows` when its code reads the parameter:

        placement                 a rank's rows come     gradient
        Replicate                 from its replica       Partial
        Shard(another dimension)  by an all-to-all       by an all-to-all in reverse
    """

    placement: Placement
    gradient: Placement
    """The placement of the gradient."""
    deferred: bool = False
    """The module's code sees None instead of the parameter; its style adds it to the output (`add_deferred_bias`)."""
    rows: Rows | None = None
    """The rows that a rank uses; None: all of its local tensor."""
    divided_by: int = 1
    """Every rank adds the parameter before an all-reduce, so each adds it divided by this number of ranks."""

    @property
    def is_collective(self) -> bool:
        """Whether a rank's rows come from all ranks, so that all ranks have to ask for them at the same time."""
        return self.rows is not None and isinstance(self.placement, Shard)


def rows_of(dim: int, sections: Sequence[Section], degree: int) -> Rows:
    """Return the rows that each of `degree` ranks uses of a dimension with these `sections`; the sizes are not
    checked."""
    runs, first = [], 0
    for section in sections:
        size, heads = (section, degree) if isinstance(section, int) else section
        ranks_per_slice = max(1, degree // heads)
        # Rounded up: the last rank may have fewer rows.
        slice_size = -(size * ranks_per_slice // -degree)
        runs.append(Run(first, slice_size, first + size, ranks_per_slice))
        first += size
    return Rows(dim, tuple(runs))


def rows_used(layout: Layout, shape: Sequence[int], ranks: int) -> Rows | None:
    """Return the rows of a full tensor of `shape` that each of `ranks` ranks uses; None: all of them."""
    if layout.rows is not None or not isinstance(layout.placement, Shard):
        return layout.rows
    return rows_of(layout.placement.dim, [shape[layout.placement.dim]], ranks)


def shard_size(length: int, ranks: int) -> int:
    """Return the size of a rank's shard of `length`, as `torch.chunk` and DTensor split it; the last may be smaller."""
    return -(length // -ranks)


def next_multiple(value: int, factor: int) -> int:
    """Return the smallest multiple of `factor` that is at least `value`."""
    return shard_size(value, factor) * factor
