"""The recorder: which collectives are issued, in which module and phase, over which ranks, how large.

    with record_collectives(model) as record:
        ...                     # one step
    record.collectives

A passive look at the dispatcher, on a process group, on ranks that are threads, and, ten times as fast, on one rank
whose peers do not exist; under a `FakeTensorMode` no size is too large. The collectives of a compiled block are seen,
too: inductor's code calls the operators as eager code does. `places` tells where the step is at that moment, `operators`
describes an operator. The collectives of a replayed CUDA graph are not seen.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from titanplans.observe.guard import Guard
from titanplans.observe.operators import NAMESPACES, Collective, describe
from titanplans.observe.tracker import ModuleTracker, follow
from titanplans.torch_private.dispatch import FakeTensor, TorchDispatchMode, fake_mode_is_on


class CollectiveRecord:
    """The issued collectives, in order.

    Attributes:
        collectives: those over more than one rank.
        places: where the step is; None if that can't be followed.
        guard: of the recorder's own code; after a failure the record is incomplete.
    """

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.places: ModuleTracker | None = None
        self.guard = Guard()

    def log_begins(self) -> None:
        """From now on collectives are for the log alone, and not in every step."""
        if self.places is not None:
            self.places.log_begins()


@contextmanager
def record_collectives(model: nn.Module) -> Iterator[CollectiveRecord]:
    """Record the collectives of what runs inside, by the modules of `model`. Not to be entered twice at a time.

    Whatever fails in the recorder is kept in `record.guard.failure` and not raised; outside nothing of it is left.
    """
    record = CollectiveRecord()
    with ExitStack() as stack:
        record.guard(_start, model, record, stack)
        yield record


def _start(model: nn.Module, record: CollectiveRecord, stack: ExitStack) -> None:
    record.places = follow(model, stack, record.guard)
    stack.enter_context(_Mode(record, record.places))


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, record: CollectiveRecord, places: ModuleTracker):
        super().__init__()
        self.record, self.places = record, places
        # Otherwise fake tensors are those of DTensor, which asks for shapes, and of a compiler.
        self.counted = (
            torch.Tensor,
            nn.Parameter,
            *([FakeTensor] if fake_mode_is_on() else []),
        )

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as if this were not here, and see the calls of the compiled code."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FakeTensor in types and FakeTensor not in self.counted:
            return func(*args, **kwargs)
        if any(kind not in self.counted for kind in types):
            return NotImplemented  # subclasses first: they issue collectives on what they hold
        result = func(*args, **kwargs)
        if getattr(func, "namespace", None) in NAMESPACES:
            self.record.guard(self._note, func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        collective = describe(func, args, kwargs, result)
        if collective is not None and collective.ranks > 1:
            module, phase = self.places.now()
            placed = collective._replace(module=module, phase=phase, of_unit=self.places.in_unit)
            self.record.collectives.append(placed)
