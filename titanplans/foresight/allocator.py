"""`replay`: the memory that CUDA's caching allocator reserves for a sequence of allocations and frees.

The rules are those of torch's c10/cuda/CUDACachingAllocator.cpp with its default settings: rounding, a pool of small and one
of large blocks for each stream, best fit, splitting, and merging of free neighbours. No constant is fitted.

    standard      A pool grows by segments, each from one cudaMalloc, and a block never spans two segments.
    expandable    A pool is one range of addresses that is mapped from its beginning (expandable_segments:True).
"""

import os
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIB = 2**20
_ROUNDING = 512
"""`kMinBlockSize`: sizes are rounded up to a multiple of it."""
_SMALL = MIB
"""`kSmallSize`: blocks up to this size are in the small pool."""
_SMALL_SEGMENT = 2 * MIB
"""`kSmallBuffer`: the size of a segment, or of a page of an expandable one, in the small pool."""
_LARGE_SEGMENT = 20 * MIB
"""`kLargeBuffer`: the size of a segment for a block below `_LARGE`, and of a page of an expandable segment."""
_LARGE = 10 * MIB
"""`kMinLargeAlloc`: a block of this size or more gets a segment of its own."""
_LARGE_ROUNDING = 2 * MIB
"""`kRoundLarge`: the size of a segment for one block of `_LARGE` or more is rounded up to a multiple of it."""

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables with the settings of torch's allocator."""


def has_expandable_segments() -> bool:
    """Whether torch's allocator would use expandable segments, by the environment."""
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in _SETTINGS)


class Event(NamedTuple):
    """An allocation or a free."""

    size: int
    """Bytes; negative for a free."""
    block: int
    """Identifies the allocation; its free has the same id."""
    stream: int
    """Index of the stream that allocates; meaningless for a free. 0 is the default stream."""


@dataclass
class Reserved:
    """Peaks of a replay, in bytes."""

    reserved: int = 0
    """The peak of the memory taken from the device: torch.cuda.max_memory_reserved()."""
    allocated: int = 0
    """The peak of the memory in blocks: torch.cuda.max_memory_allocated()."""
    reserved_at: int = 0
    """Index of the event at which the reserved memory first reached its peak."""
    retries: int = 0
    """How often the device was full, and unused segments were returned to it."""
    is_out_of_memory: bool = False
    """An allocation failed even after unused segments were returned; the replay ended there."""


class _Block:
    """A range of a segment; neighbours are linked in the order of their addresses."""

    __slots__ = ("after", "before", "is_free", "number", "pool", "size")

    def __init__(self, size: int, pool: "_Pool", number: int):
        self.size, self.pool, self.number, self.is_free = size, pool, number, False
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """The small blocks of one stream, or its large blocks."""

    def __init__(self, is_small: bool):
        self.is_small = is_small
        self.free: list[tuple[int, int, _Block]] = []
        """Free blocks, sorted by size, then by number."""
        self.last: _Block | None = None
        """With expandable segments, the block with the highest address."""

    @property
    def page(self) -> int:
        return _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT

    def add(self, block: _Block) -> None:
        block.is_free = True
        insort(self.free, (block.size, block.number, block))

    def remove(self, block: _Block) -> None:
        block.is_free = False
        self.free.pop(bisect_left(self.free, (block.size, block.number, block)))


class _Allocator:
    def __init__(self, capacity: int | None, expandable: bool):
        self.capacity, self.expandable = capacity, expandable
        self.pools: dict[tuple[int, bool], _Pool] = {}
        self.reserved = self.allocated = self.count = self.retries = 0

    def allocate(self, size: int, stream: int) -> _Block | None:
        """Return a block of at least `size` bytes; None if the device is full."""
        rounded = max(_ROUNDING, -(size // -_ROUNDING) * _ROUNDING)
        is_small = rounded <= _SMALL
        pool = self.pools.setdefault((stream, is_small), _Pool(is_small))
        block = self._best_fit(pool, rounded) or self._new(pool, rounded)
        if block is None:
            self.retries += 1
            self._return_unused()
            if (block := self._new(pool, rounded)) is None:
                return None
        remaining = block.size - rounded
        # A large block of a standard segment is split only if more than `_SMALL` remains.
        if remaining >= _ROUNDING if is_small or self.expandable else remaining > _SMALL:
            rest = self._block(remaining, pool)
            rest.before, rest.after, block.size = block, block.after, rounded
            if block.after is not None:
                block.after.before = rest
            block.after = rest
            if pool.last is block:
                pool.last = rest
            pool.add(rest)
        self.allocated += block.size
        return block

    def free(self, block: _Block) -> None:
        """Make `block` available again, merged with free neighbours."""
        self.allocated -= block.size
        if (before := block.before) is not None and before.is_free:
            before.pool.remove(before)
            block = self._merge(before, block)
        if (after := block.after) is not None and after.is_free:
            after.pool.remove(after)
            block = self._merge(block, after)
        block.pool.add(block)

    def _merge(self, block: _Block, after: _Block) -> _Block:
        block.size, block.after = block.size + after.size, after.after
        if after.after is not None:
            after.after.before = block
        if block.pool.last is after:
            block.pool.last = block
        return block

    def _block(self, size: int, pool: _Pool) -> _Block:
        self.count += 1
        return _Block(size, pool, self.count)

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """Take the smallest free block of at least `size` bytes."""
        index = bisect_left(pool.free, (size, -1))
        # With expandable segments the last block counts as infinite, since it can grow.
        if self.expandable and index < len(pool.free) - 1 and pool.free[index][2] is pool.last:
            index += 1
        if index == len(pool.free):
            return None
        block = pool.free[index][2]
        pool.remove(block)
        return block

    def _new(self, pool: _Pool, size: int) -> _Block | None:
        """Take memory from the device for a block of at least `size` bytes; None if the device has not enough."""
        last = pool.last
        tail = last.size if self.expandable and last is not None and last.is_free else 0
        if self.expandable:
            taken = -((size - tail) // -pool.page) * pool.page
        elif pool.is_small:
            taken = _SMALL_SEGMENT
        elif size < _LARGE:
            taken = _LARGE_SEGMENT
        else:
            taken = -(size // -_LARGE_ROUNDING) * _LARGE_ROUNDING
        if self.capacity is not None and self.reserved + taken > self.capacity:
            return None
        self.reserved += taken
        block = self._block(taken, pool)
        if not self.expandable:
            return block
        if last is not None:
            last.after, block.before = block, last
        pool.last = block
        if tail:
            assert last is not None
            pool.remove(last)
            block = self._merge(last, block)
        return block

    def _return_unused(self) -> None:
        """Return to the device what no block uses: free segments, or the pages at the end of expandable ones."""
        # Pages in the middle of an expandable segment could be returned, too, which is not modelled.
        for pool in self.pools.values():
            for _, _, block in list(pool.free):
                if self.expandable and block is pool.last:
                    returned = block.size // pool.page * pool.page
                elif not self.expandable and block.before is None and block.after is None:
                    returned = block.size
                else:
                    continue
                pool.remove(block)
                self.reserved -= returned
                if returned < block.size:
                    block.size -= returned
                    pool.add(block)
                elif self.expandable:
                    pool.last = block.before
                    if block.before is not None:
                        block.before.after = None


def replay(events: Iterable[Event], *, expandable: bool = False, capacity: int | None = None) -> Reserved:
    """Return the peaks of an allocator that gets `events` in order.

    Args:
        events: allocations and frees.
        expandable: with expandable segments.
        capacity: bytes that the device has for the allocator; None: no limit.
    """
    allocator, blocks, peak = _Allocator(capacity, expandable), dict[int, _Block](), Reserved()
    for index, (size, key, stream) in enumerate(events):
        if size < 0:
            allocator.free(blocks.pop(key))
            continue
        block = allocator.allocate(size, stream)
        if block is None:
            peak.is_out_of_memory = True
            break
        blocks[key] = block
        peak.allocated = max(peak.allocated, allocator.allocated)
        if allocator.reserved > peak.reserved:
            peak.reserved, peak.reserved_at = allocator.reserved, index
    peak.retries = allocator.retries
    return peak
