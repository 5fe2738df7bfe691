"""Records the collectives of a step: in which module and phase, over which ranks, and how large.

    with record_collectives(model) as record:
        ...                     # one step
    record.collectives

The recorder is a dispatch mode. It works on a process group, on ranks that are threads, and, ten times as fast, on a fake
process group. Under a `FakeTensorMode` a model of any size can be recorded. Collectives of compiled blocks are recorded,
too, since inductor's code calls the operators as eager code does. Collectives of a replayed CUDA graph are not recorded.
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
    """The recorded collectives of a step."""

    places: ModuleTracker
    """Tells the module and the phase that run now."""
    collectives: list[Collective] = field(default_factory=list)
    """Collectives over more than one rank, in order."""
    failure: str | None = None
    """The error about an operator that `operators.describe` does not know: the record is then incomplete. None: it is
    complete."""


@contextmanager
def record_collectives(model: nn.Module) -> Iterator[CollectiveRecord]:
    """Record the collectives that are issued in the body, with the modules of `model`. It can't be nested."""
    with ExitStack() as stack:
        record = CollectiveRecord(follow(model, stack))
        stack.enter_context(_Mode(record))
        yield record


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, record: CollectiveRecord):
        super().__init__()
        self.record = record
        # Outside of a fake mode, fake tensors come from DTensor's shape propagation or from a compiler, and are not
        # counted.
        self.counted = (
            torch.Tensor,
            nn.Parameter,
            *([FakeTensor] if fake_mode_is_on() else []),
        )

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compile as without this mode, and record the calls of the compiled code

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FakeTensor in types and FakeTensor not in self.counted:
            return func(*args, **kwargs)
        if any(kind not in self.counted for kind in types):
            # A subclass handles the operator first, since it issues collectives on its inner tensors.
            return NotImplemented
        result = func(*args, **kwargs)
        if getattr(func, "namespace", None) in NAMESPACES:
            try:
                collective = describe(func, args, kwargs, result)
            except NotImplementedError as error:
                self.record.failure = str(error)
                return result
            if collective is not None and collective.ranks > 1:
                module, phase = self.record.places.now()
                placed = collective._replace(module=module, phase=phase, is_fsdp=self.record.places.in_unit)
                self.record.collectives.append(placed)
        return result
