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
from dataclasses import dataclass, field

import torch
from torch import nn

from titanplans.observe.operators import NAMESPACES, Collective, describe
from titanplans.observe.tracker import ModuleTracker, follow
from titanplans.torch_private.dispatch import FakeTensor, TorchDispatchMode, fake_mode_is_on


@dataclass
class CollectiveRecord:
    """The issued collectives, in order."""

    places: ModuleTracker
    """Where the step is."""
    collectives: list[Collective] = field(default_factory=list)
    """Those over more than one rank."""
    failure: str | None = None
    """The operator that `operators` does not know; the record is then incomplete."""


@contextmanager
def record_collectives(model: nn.Module) -> Iterator[CollectiveRecord]:
    """Record the collectives of what runs inside, by the modules of `model`. Not to be entered twice at a time."""
    with ExitStack() as stack:
        record = CollectiveRecord(follow(model, stack))
        stack.enter_context(_Mode(record))
        yield record


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, record: CollectiveRecord):
        super().__init__()
        self.record = record
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
            try:
                collective = describe(func, args, kwargs, result)
            except NotImplementedError as error:
                self.record.failure = str(error)
                return result
            if collective is not None and collective.ranks > 1:
                module, phase = self.record.places.now()
                placed = collective._replace(module=module, phase=phase, of_unit=self.record.places.in_unit)
                self.record.collectives.append(placed)
        return result
