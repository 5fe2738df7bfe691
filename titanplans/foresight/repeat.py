"""Parts of a rehearsal that stand for others: chunks of the fused loss, and micro batches of a pipeline.

The events of a part are recorded once, and `Excerpt` notes them again for each part that allocates the same tensors. So the
rehearsal runs only the first parts of a kind, and the record has the events of all parts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from titanplans.foresight.pipeline import RehearsedStage
from titanplans.loss.fused import ChunkSums
from titanplans.observe.storages import Segment, StorageEvent, StorageRecord
from titanplans.torch_private.swapped import swapped


class PartsDiffer(Exception):
    """A part of a rehearsal can't stand for others, although others have already been repeated from it."""


@dataclass
class Excerpt:
    """The events and operations of a record between two moments.

    Attributes:
        first: the index of the first allocation.
        end: one more than the index of the last allocation.
    """

    record: StorageRecord
    first: int = field(init=False)
    end: int = field(init=False)
    _events: list[StorageEvent] = field(init=False)
    _operations: list[Any] = field(init=False)
    _last: Segment = field(init=False)

    def __post_init__(self):
        record = self.record
        self.first = len(record.allocations)
        self._from = len(record.events), len(record.operations)

    def close(self) -> None:
        """End the excerpt."""
        record, (event, operation) = self.record, self._from
        self.end = len(record.allocations)
        self._events, self._operations = record.events[event:], record.operations[operation:]
        self._last = record.segment

    def freed(self) -> set[int]:
        """Return the allocations that are freed in the excerpt."""
        return {event.allocation for event in self._events if event.is_free}

    def allocated(self) -> set[int]:
        """Return the allocations that are made in the excerpt."""
        return set(range(self.first, self.end))

    def note_again(
        self,
        copies: dict[int, int],
        make: Callable[[int], None] | None = None,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """Note the events and operations again, in the record's current segment.

        Args:
            copies: the index of the copy of each live allocation that the excerpt frees. Copies of
                the excerpt's own allocations are added, and removed when they are freed.
            make: makes the tensor in `keep` with this index.
            keep: allocations whose copy belongs to a real tensor, so that the copy is freed when this tensor is dropped.
        """
        record, here = self.record, self.record.segment
        segments: dict[Segment, Segment] = {}

        def moved(segment: Segment) -> Segment:
            if segment not in segments:
                segments[segment] = replace(
                    here, kind=segment.kind if segment.action is not None else here.kind, block=segment.block
                )
            return segments[segment]

        for event in self._events:
            if event.is_free:
                if event.allocation not in keep:
                    index = copies.pop(event.allocation)
                    record.events.append(StorageEvent(True, index, moved(event.segment)))
                    record.live -= record.allocations[index].size
                continue
            source = record.allocations[event.allocation]
            record.segment = moved(event.segment)
            if event.allocation in keep:
                assert make is not None
                index = len(record.allocations)
                make(event.allocation)
                record.allocations[index] = replace(source, segment=record.segment, part=None, owner=None)
                continue
            copies[event.allocation] = len(record.allocations)
            record.note_allocation(replace(source, segment=record.segment))
        record.operations += [each._replace(segment=moved(each.segment)) for each in self._operations]
        record.segment = moved(self._last)


@contextmanager
def repeating_chunks(record: StorageRecord) -> Iterator[None]:
    """In the body, run only the first two chunks of each fused loss and the last one, and repeat the second."""
    add = ChunkSums.add

    def add_or_repeat(sums: ChunkSums, chunk: slice, labels: torch.Tensor) -> None:
        excerpt: Excerpt | None = getattr(sums, "excerpt", None)
        is_last = chunk.stop == len(sums.hidden)
        if excerpt is not None and not is_last and excerpt.freed() == excerpt.allocated():
            excerpt.note_again({})
        elif chunk.start and excerpt is None:
            sums.excerpt = excerpt = Excerpt(record)  # type: ignore[attr-defined]
            add(sums, chunk, labels)
            del labels
            excerpt.close()
        else:
            add(sums, chunk, labels)

    with swapped(ChunkSums, "add", add_or_repeat):
        yield


class _Returned(NamedTuple):
    """A tensor that a computation of a stage returns."""

    shape: torch.Size
    dtype: torch.dtype
    allocation: int


@dataclass
class _Repeatable:
    """The forward or the backward of a micro batch that stands for others."""

    excerpt: Excerpt
    outputs: list[_Returned | None]
    is_tuple: bool

    @property
    def is_repeatable(self) -> bool:
        """Whether each tensor that it returns is another one of its own allocations."""
        made = [each.allocation for each in self.outputs if each is not None]
        return len(made) == len(set(made)) and self.excerpt.allocated() >= set(made)

    def repeat(self, copies: dict[int, int]) -> Any:
        """Note its events again, and return tensors like those that it has returned."""
        tensors: dict[int, torch.Tensor] = {}
        made = {each.allocation: each for each in self.outputs if each is not None}

        def make(allocation: int) -> None:
            tensors[allocation] = torch.empty(made[allocation].shape, dtype=made[allocation].dtype)

        self.excerpt.note_again(copies, make, frozenset(made))
        outputs = [None if each is None else tensors[each.allocation] for each in self.outputs]
        return tuple(outputs) if self.is_tuple else outputs[0]


class RepeatedStage(RehearsedStage):
    """A stage that runs the first two micro batches of the rehearsal and the first one of each batch.

    The second one stands for all others. A computation finds the index of its micro batch in `record().segment.action`. A
    subclass sets `record`.

    A schedule that splits the backward is run in full.
    """

    record: Callable[[], StorageRecord]
    repeats = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._forward: _Repeatable | None = None
        self._backward: _Repeatable | None = None
        self._copies: dict[int, dict[int, int]] = {}
        """By micro batch, the copies of what the forward of the second micro batch keeps for its backward."""

    def forward_maybe_with_nosync(self, *received: Any, **inputs: Any) -> Any:
        """Run or repeat the forward of a micro batch."""

        def run() -> Any:
            return super(RepeatedStage, self).forward_maybe_with_nosync(*received, **inputs)

        microbatch = self._microbatch("forward")
        if not microbatch:
            return run()
        if self._forward is None:
            output, self._forward = self._recorded(run)
            return output
        if not self._forward.is_repeatable:
            return run()
        copies = self._copies[microbatch] = {}
        self.record().places.skip("forward")
        return self._forward.repeat(copies)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False
    ) -> Any:
        """Run or repeat the backward of a micro batch."""

        def run() -> Any:
            return super(RepeatedStage, self).backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward
            )

        microbatch = self._microbatch("backward")
        if not microbatch or backward_type != "full":
            return run()
        if self._backward is None:
            result, self._backward = self._recorded(run, lambda result: result[0])
            self._check()
            return result
        if microbatch not in self._copies:
            return run()
        self.record().places.skip("backward")
        return self._backward.repeat(self._copies.pop(microbatch)), None

    def _microbatch(self, kind: str) -> int:
        """Return the micro batch that runs; 0 also if it can't be repeated."""
        action: Any = self.record().segment.action
        return action.microbatch if self.repeats and action is not None and action.kind == kind else 0

    def _recorded(self, run: Callable[[], Any], outputs_of: Callable[[Any], Any] = lambda x: x) -> Any:
        record = self.record()
        excerpt = Excerpt(record)
        result = run()
        excerpt.close()
        outputs = outputs_of(result)
        is_tuple = isinstance(outputs, tuple)
        made = [self._made(x, record) for x in (outputs if is_tuple else (outputs,))]
        return result, _Repeatable(excerpt, made, is_tuple)

    def _made(self, x: Any, record: StorageRecord) -> _Returned | None:
        if x is None:
            return None
        index = None if isinstance(x, DTensor) else record.allocation_of(x)
        return _Returned(x.shape, x.dtype, -1 if index is None else index)

    def _check(self) -> None:
        """Refuse a micro batch that keeps tensors, or frees those of another one, since its copies would not do so."""
        assert self._forward is not None
        assert self._backward is not None
        if not self._forward.is_repeatable:
            self._backward = None
            return
        forward, backward = self._forward.excerpt, self._backward.excerpt
        made = {
            each.allocation
            for part in (self._forward, self._backward)
            for each in part.outputs
            if each is not None
        }
        everything = forward.allocated() | backward.allocated()
        freed = (forward.freed() | backward.freed()) - made
        if not self._backward.is_repeatable or freed != everything - made:
            raise PartsDiffer(f"stage {self.stage_index}")
