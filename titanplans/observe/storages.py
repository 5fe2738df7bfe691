"""`record_storages`: record a step on fake tensors: its allocations and frees in order, the purpose of each allocation, and
the work of its operators.

    with FakeTensorMode(), record_storages(model) as record:
        ...                     # a step
    record.events, record.operations

It is a dispatch mode, as `recorder` is. Each storage is an allocation; it is freed when the last tensor in it is dropped, or
when FSDP2 resizes it to nothing.
"""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.observe.operators import Phase
from titanplans.observe.tracker import ModuleTracker, follow
from titanplans.observe.work import Work, work_of
from titanplans.torch_private.dispatch import (
    FakeTensor,
    TorchDispatchMode,
    address_of,
    fake_device,
    storage_id,
    tree_leaves,
    watch_resizes,
)
from titanplans.torch_private.dtensor import local_tensor, watch_shape_propagation


@dataclass(frozen=True)
class Segment:
    """A stretch of time in a step."""

    step: int
    """Counted from 1; 0 is before the first step."""
    kind: str
    """"forward" or "backward" of a block; otherwise what the step does, such as "loss", "clip" or "update"."""
    block: int | None = None
    """Index of the block; None if the segment is not a block's."""
    batch: int = 0
    """Index of the batch in the step (gradient accumulation), or of the micro batch of a pipeline."""
    action: Hashable = None
    """With a pipeline, the computation of the schedule; None: outside of its computations."""


class StorageEvent(NamedTuple):
    """An allocation or a free."""

    is_free: bool
    allocation: int
    """Index of the allocation."""
    segment: Segment
    """When it happens."""


class Operation(NamedTuple):
    """An operator that launches a kernel, or the launch of a kernel of Triton."""

    work: Work
    stream: int
    """Index of the stream that it runs on; 0 is the default stream."""
    segment: Segment
    """When it runs."""
    module: str | None
    """The module that runs; None: none of the model's."""
    phase: Phase
    is_fsdp: bool
    """Issued while FSDP2 gathers parameters or reduces gradients."""


@dataclass
class Allocation:
    """A storage, from its allocation to its free."""

    size: int
    """Bytes."""
    stream: int
    """Index of the stream that allocates it; 0 is the default stream."""
    module: str | None
    """The module that runs; None: none of the model's."""
    phase: Phase
    operator: str
    shape: tuple[int, ...]
    output: int
    """Index among the operator's outputs."""
    outputs: int
    """The number of the operator's outputs: as many as parameters if a foreach operator of an optimizer returns them."""
    is_fsdp: bool
    """Allocated while FSDP2 gathers parameters or reduces gradients."""
    segment: Segment
    """When it is allocated."""
    part: str | None = None
    """What the memory is for; None unless `StorageRecord.label` has set it."""
    owner: str | None = None
    """The name of the parameter that it belongs to; None unless `StorageRecord.label` has set it."""
    is_resized: bool = False
    """FSDP2 frees and allocates it with `resize_`: it holds parameters that are gathered."""


@dataclass
class StorageRecord:
    """The allocations, the frees and the operators of a step."""

    places: ModuleTracker
    """Tells the module and the phase that run now."""
    events: list[StorageEvent] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    segment: Segment = Segment(0, "begin")
    """The segment in which events are recorded now. Set by the caller."""
    live: int = 0
    """Bytes that are allocated now."""
    peak: int = 0
    """The largest `live` so far."""
    is_paused: bool = False
    """Whether no operators are recorded now (see `paused`): a rank would not run them, or would run them in one kernel."""
    _open: dict[int, int] = field(default_factory=dict)
    """The index of each live allocation, by the address of its storage object."""
    _resizable: dict[int, Allocation] = field(default_factory=dict)
    """The newest allocation of each storage that has been resized, by the address of its storage object."""
    _streams: list[Any] = field(default_factory=list)

    def label(self, tensors: Iterable[tuple[str | None, torch.Tensor]], part: str) -> None:
        """Set what live tensors are for, unless it is set already.

        Args:
            tensors: each with the name of the parameter that it belongs to. DTensors stand for their local tensors.
            part: what they are for.
        """
        for owner, tensor in tensors:
            local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            index = self.allocation_of(local)
            if index is not None and (allocation := self.allocations[index]).part is None:
                allocation.part, allocation.owner = part, owner

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no operators in the body, because a rank on a GPU does not run them, or not one by one.

        Examples are DTensor's propagation of shapes, and operators that are fused into one kernel.
        """
        self.is_paused, before = True, self.is_paused
        try:
            yield
        finally:
            self.is_paused = before

    def allocation_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the live allocation of a tensor; None if it was not recorded."""
        return self._open.get(storage_id(tensor))

    def operate(self, work: Work) -> None:
        """Note an operator's work."""
        module, phase = self.places.now()
        self.operations.append(
            Operation(work, self._stream(), self.segment, module, phase, self.places.in_unit)
        )

    def allocate(self, tensor: torch.Tensor, operator: str, at: int, of: int) -> None:
        """Note the storage of an operator's output, if it is new."""
        storage = tensor.untyped_storage()
        key = address_of(storage)
        if key in self._open or not (size := storage.nbytes()):
            return
        self._open_allocation(key, self._allocation(size, operator, tensor.shape, (at, of)))
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self._free(key)
        self._resizable.pop(key, None)

    def _free(self, key: int) -> None:
        index = self._open.pop(key, None)
        if index is not None:
            self.events.append(StorageEvent(True, index, self.segment))
            self.live -= self.allocations[index].size

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a storage."""
        key, size = address_of(storage), storage.nbytes()
        before = self._resizable.get(key)
        if (index := self._open.get(key)) is not None:
            before = self.allocations[index]
            if before.size == size:
                return
            # Only FSDP2 resizes storages, and only the storages of gathered parameters.
            before.is_fsdp = before.is_resized = True
            self._resizable[key] = before
            self._free(key)
        if size and before is not None:
            allocation = self._allocation(size, "resize_", before.shape)
            allocation.is_fsdp = allocation.is_resized = True
            allocation.module = before.module
            self._open_allocation(key, allocation)

    def _allocation(
        self,
        size: int,
        operator: str,
        shape: Sequence[int],
        output: tuple[int, int] = (0, 1),
    ) -> Allocation:
        module, phase = self.places.now()
        at, of = output
        is_fsdp, stream, segment = self.places.in_unit, self._stream(), self.segment
        return Allocation(size, stream, module, phase, operator, tuple(shape), at, of, is_fsdp, segment)

    def _open_allocation(self, key: int, allocation: Allocation) -> None:
        self._open[key] = len(self.allocations)
        self.note_allocation(allocation)

    def note_allocation(self, allocation: Allocation) -> None:
        """Note an allocation that happens now."""
        self.events.append(StorageEvent(False, len(self.allocations), allocation.segment))
        self.allocations.append(allocation)
        self.live += allocation.size
        self.peak = max(self.peak, self.live)

    def _stream(self) -> int:
        # On a CPU torch has stream objects that do nothing, and FSDP2 switches between them as on a GPU.
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)


@contextmanager
def record_storages(model: nn.Module) -> Iterator[StorageRecord]:
    """Record what the body allocates and frees. It runs in a FakeTensorMode, and can't be nested."""
    with ExitStack() as stack:
        record = StorageRecord(follow(model, stack))
        record._stream()  # the stream outside of FSDP2 is stream 0
        mode = _StorageMode(record)
        stack.enter_context(watch_resizes(record.resize))
        stack.enter_context(watch_shape_propagation(record.paused))
        stack.enter_context(mode)
        yield record
        record._open.clear()  # what is freed from now on belongs to no step


_DEVICE = torch.ops.prim.device.default


class _StorageMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, record: StorageRecord):
        super().__init__()
        self.record = record

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE and len(args) == 1 and isinstance(args[0], FakeTensor):
            return fake_device(args[0])  # half of all calls, so it skips FakeTensorMode
        if not all(issubclass(kind, FakeTensor | nn.Parameter) or kind is torch.Tensor for kind in types):
            return NotImplemented  # tensor subclasses handle the operator first
        result = func(*args, **(kwargs or {}))
        if not self.record.is_paused:
            outputs = [
                x for x in tree_leaves(result) if isinstance(x, FakeTensor) and x.device.type != "meta"
            ]
            for index, output in enumerate(outputs):
                self.record.allocate(output, str(func), index, len(outputs))
            if (work := work_of(func, args, kwargs or {}, result)) is not None:
                self.record.operate(work)
        return result
