"""The depth of a model by repetition: a few blocks are rehearsed, and the events of the middle ones are repeated.

A step's events are cut into segments: the forward and the backward of each block, and the rest. `Depth` decides which blocks
stand for others, `rehearse` leaves those out, and `expand` puts their events back.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol, TypeVar

from torch import nn

from titanplans.foresight.allocator import Event
from titanplans.foresight.rehearsal import Rehearsal
from titanplans.observe.storages import Allocation, Segment, StorageEvent
from titanplans.split.decoder import Decoder, within

_AROUND = 2
"""Blocks that are rehearsed before and after the repeated ones, at least: FSDP2 gathers one block in advance, and its
reductions end one block later, so the block next to the first or the last one still differs from those in the middle."""


class Repetition(NamedTuple):
    """Which of a sequence of blocks are left out, because others stand for them."""

    first: int
    """Index of the first block that stands for others."""
    period: int
    """The number of consecutive blocks that are repeated together, such as one of attention and seven of Mamba."""
    count: int
    """How often this period occurs in a row; 1: no block is left out."""

    @classmethod
    def find(cls, kinds: Sequence[Hashable]) -> "Repetition":
        """Return the repetition with which the fewest blocks have to be rehearsed, given the kind of each block."""
        best = cls(0, 1, 1)
        for period in range(1, len(kinds) // 3 + 1):
            # The blocks from `start` on have this period.
            start = len(kinds) - period
            while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
                start -= 1
            around = -(_AROUND // -period) * period
            first = start + around
            count = (len(kinds) - first - around) // period
            if (count - 1) * period > (best.count - 1) * best.period:
                best = cls(first, period, count)
        return best


class Depth:
    """Which blocks of a job's model are rehearsed, and which blocks each of them stands for.

    Args:
        kinds: the kind of each block of the job's model; blocks of the same kind allocate the same tensors.
        starts: the index of the first block of each pipeline stage; (0,) without a pipeline.

    Attributes:
        removed: the indices in the job's model of the blocks that are left out.
        places: for each rehearsed block, the indices in the job's model of the blocks that it stands for.
        starts: the index of the first rehearsed block of each stage.
    """

    def __init__(self, kinds: Sequence[Hashable], starts: Sequence[int] = (0,)):
        self.removed: set[int] = set()
        self.places: list[tuple[int, ...]] = []
        self.starts: list[int] = []
        for begin, end in pairwise([*starts, len(kinds)]):
            first, period, count = Repetition.find(kinds[begin:end])
            self.starts.append(len(self.places))
            for block in range(first + period):
                copies = range(count if block >= first else 1)
                self.places.append(tuple(begin + block + copy * period for copy in copies))
            rest = begin + first + count * period
            self.removed.update(range(begin + first + period, rest))
            self.places += [(block,) for block in range(rest, end)]

    def copies(self, block: int | None) -> int:
        """Return how many blocks a rehearsed block stands for; 1 for None."""
        return 1 if block is None else len(self.places[block])

    def place(self, block: int, copy: int = 0) -> int:
        """Return the index in the job's model of the `copy`-th block that a rehearsed block stands for."""
        return self.places[block][copy]

    def place_near(self, block: int, other: int, place: int) -> int:
        """Return the index in the job's model that is as far from `place` as the rehearsed `block` is from `other`."""
        if self.copies(block) == self.copies(other) == 1:
            return self.place(block)
        return place + block - other


class _Noted(Protocol):
    @property
    def segment(self) -> Segment: ...


T = TypeVar("T", bound=_Noted)


def unrolled(items: Iterable[T], depth: Depth) -> Iterator[tuple[Segment, list[T], int]]:
    """Yield each segment with its events or operations, in the order of the job's model.

    A segment of a block that stands for others comes once for each of them, with the index of the copy.
    """
    grouped = [(segment, list(run)) for segment, run in groupby(items, lambda item: item.segment)]

    def repeated(item: tuple[Segment, list[T]]) -> tuple[int, Segment]:
        copies = depth.copies(item[0].block)
        return copies, replace(item[0], block=None) if copies > 1 else item[0]

    for (count, _), run in groupby(grouped, repeated):
        stretch = list(run)
        copies = range(count) if stretch[0][0].kind == "forward" else reversed(range(count))
        for copy in copies:
            for segment, of_segment in stretch:
                yield segment, of_segment, copy


def kinds_of(decoder: Decoder, recomputed: Collection[str]) -> list[Hashable]:
    """Return for each block of a model on meta what determines the tensors of its forward and backward.

    `recomputed` are the names of the modules that are recomputed in the backward.
    """
    return [
        (
            _kind(block.module),
            tuple(
                f"{name}.".removeprefix(block.name)
                for name in recomputed
                if name == block.name or within(name, block.name)
            ),
        )
        for block in decoder.blocks
    ]


def _kind(block: nn.Module) -> Hashable:
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    )
    settings = tuple(
        (name, type(module), attribute, value)
        for name, module in block.named_modules()
        for attribute, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str)
        and not re.search("idx|index|layer_id|layer_num", attribute)
    )
    return tensors, settings


@dataclass
class Expanded:
    """The events of a job's model."""

    events: list[Event]
    sources: list[int]
    """By the id of a block of memory, the index of the rehearsed allocation that it repeats."""
    segments: list[Segment]
    """The segment of each event."""
    missing: int = 0
    """Bytes of frees for which no allocation was found."""
    leaked: int = 0
    """Bytes of copies that are never freed, although the rehearsed allocations are."""
    differing: int | None = None
    """A rehearsed block that stands for others, and whose forward allocates other tensors than the next block of its kind;
    None: there is none."""


class _Expansion:
    def __init__(self, rehearsal: Rehearsal, depth: Depth):
        self.record, self.depth = rehearsal.record, depth
        self.result = Expanded([], [], [])
        self.live: dict[Segment, dict[int, int]] = defaultdict(dict)
        """The id of each live block of memory, by segment and order."""
        self.order: dict[int, int] = {}
        """The order of each rehearsed allocation in its segment."""
        self.owners = owners_of(rehearsal)
        counts: dict[Segment, int] = defaultdict(int)
        for event in self.record.events:
            if not event.is_free:
                self.order[event.allocation] = counts[event.segment]
                counts[event.segment] += 1

    def run(self) -> Expanded:
        """Emit all events."""
        for segment, events, copy in unrolled(self.record.events, self.depth):
            self._rest(segment, events) if segment.block is None else self._block(segment, events, copy)
        self.result.differing = self._differing()
        self.result.leaked = sum(event.size for event in self.result.events) - self._never_freed()
        return self.result

    def _differing(self) -> int | None:
        tensors: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for allocation in self.record.allocations:
            block = allocation.segment.block if allocation.segment.kind == "forward" else None
            if block is not None and not allocation.is_fsdp:  # FSDP2 gathers some parameters in advance
                tensors[block].append((allocation.operator, allocation.size))
        # The first block of a stage also begins the residual stream.
        inner = tensors.keys() - set(self.depth.starts)
        for block in inner:
            if self.depth.copies(block) > 1:
                period = self.depth.place(block, 1) - self.depth.place(block)
                others = inner & {block - period, block + period}
                if any(tensors[block] != tensors[other] for other in others):
                    return block
        return None

    def _never_freed(self) -> int:
        """Return the bytes that the job's model allocates and does not free."""
        freed = {event.allocation for event in self.record.events if event.is_free}
        return sum(
            allocation.size * self.depth.copies(self._block_of(index))
            for index, allocation in enumerate(self.record.allocations)
            if index not in freed
        )

    def _block(self, segment: Segment, events: Iterable[StorageEvent], copy: int) -> None:
        """Emit the events of the forward or backward of a block, as its `copy`-th copy."""
        assert segment.block is not None
        place = self.depth.place(segment.block, copy)
        here = replace(segment, block=place)
        for event in events:
            source, owner = (
                self.record.allocations[event.allocation].segment,
                self.owners.get(event.allocation),
            )
            of_block = owner if source.block is None else source.block
            if not event.is_free:
                self._allocate(event.allocation, here, here, self.order[event.allocation])
            elif of_block is None:
                if self.order[event.allocation] in self.live[source]:  # the first copy frees it
                    self._free(event.allocation, here, source)
            else:
                near = self.depth.place_near(of_block, segment.block, place)
                self._free(event.allocation, here, *_of(source, near))

    def _rest(self, segment: Segment, events: Iterable[StorageEvent]) -> None:
        """Emit events outside of blocks. Consecutive events that belong to the same repeated block are repeated together."""
        for block, run in groupby(events, lambda event: self._block_of(event.allocation)):
            stretch = list(run)
            for place in (None,) if block is None else self.depth.places[block]:
                for event in stretch:
                    source = self.record.allocations[event.allocation].segment
                    if not event.is_free:
                        self._allocate(
                            event.allocation, segment, segment, self.order[event.allocation], place
                        )
                    else:
                        self._free(
                            event.allocation,
                            segment,
                            *((source, None) if place is None else _of(source, place)),
                        )

    def _block_of(self, allocation: int) -> int | None:
        block = self.record.allocations[allocation].segment.block
        return self.owners.get(allocation) if block is None else block

    def _allocate(
        self, allocation: int, now: Segment, segment: Segment, order: int, place: int | None = None
    ) -> None:
        number, source = len(self.result.sources), self.record.allocations[allocation]
        self.result.sources.append(allocation)
        self.live[_key(segment, place)][order] = number
        self.result.events.append(Event(source.size, number, source.stream))
        self.result.segments.append(now)

    def _free(self, allocation: int, now: Segment, segment: Segment, place: int | None = None) -> None:
        there, like = self.live[_key(segment, place)], self.record.allocations[allocation]
        order: int | None = self.order[allocation]
        if order not in there or not self._is_like(there[order], like):
            # The block at this place is not a copy but next to the copies, and may allocate in another order.
            order = next((other for other, number in there.items() if self._is_like(number, like)), None)
        if order is None:
            self.result.missing += like.size
            return
        self.result.events.append(Event(-like.size, there.pop(order), 0))
        self.result.segments.append(now)

    def _is_like(self, number: int, like: Allocation) -> bool:
        """Whether the block of memory `number` is a copy of `like`, or of one that the same code allocates."""
        source = self.record.allocations[self.result.sources[number]]
        return (source.size, source.operator, source.shape) == (like.size, like.operator, like.shape)


def _of(source: Segment, place: int) -> tuple[Segment, int | None]:
    """Return the arguments of `_key` for the block at `place` in the job's model."""
    return (source, place) if source.block is None else (replace(source, block=place), None)


def _key(segment: Segment, place: int | None) -> Segment:
    """Return the key of what a segment allocates; `place`: for which block, if the segment itself is outside of blocks."""
    return segment if place is None else replace(segment, kind=f"{segment.kind} of a block", block=place)


def owners_of(rehearsal: Rehearsal) -> dict[int, int]:
    """Return the index of the block, by allocation, for allocations outside of blocks that belong to one block."""
    block_of = {}
    groups = {len(group): group for group in rehearsal.parameters}
    for index, allocation in enumerate(rehearsal.record.allocations):
        owner = allocation.owner
        if owner is None and allocation.is_fsdp and allocation.module is not None:
            owner = allocation.module  # a pipeline's schedule may gather the parameters of all blocks at once
        if (
            owner is None
            and allocation.phase == "update"
            and allocation.outputs > 1
            and allocation.outputs in groups
        ):
            # A foreach operator of an optimizer returns a tensor for each parameter of a group.
            owner = groups[allocation.outputs][allocation.output]
        if (block := rehearsal.block_of(owner)) is not None:
            block_of[index] = block
    return block_of


def expand(rehearsal: Rehearsal, depth: Depth) -> Expanded:
    """Return the events of the job's model, from the rehearsal of the model without the blocks `depth.removed`."""
    return _Expansion(rehearsal, depth).run()
