"""All ranks of a job that was asked to end agree on the step after which they do, without a collective.

A signal reaches some ranks earlier than others, or one alone, and a checkpoint is saved by all of them at one step. The
first rank that was asked writes into the process group's store after which step: the next but one. No rank has ended that
step before it has seen the note, because each step ends with a sum over all ranks (of the gradient's norm). On an
accelerator, which works off what its process has queued, the process first waits for the step before the last, with which
the accelerator is mostly done.
"""

from collections.abc import Callable

import torch
from torchtitan.tools.utils import device_type

from titanplans.torch_private.distributed import default_store

_KEY = "titanplans/last_step"


class Ending:
    """Asked after each step whether it is the last.

    Args:
        asked: whether this rank was asked to end.
    """

    def __init__(self, asked: Callable[[], bool]):
        self.asked, self.store = asked, default_store()
        self._noted = False
        self._before: torch.Event | None = None

    def is_last(self, step: int) -> bool:
        """Whether all ranks end after `step`, which this one has taken."""
        if device_type != "cpu":
            if self._before is not None:
                self._before.synchronize()
            self._before = torch.Event(device_type)
            self._before.record()
        if self.asked() and not self._noted:
            self._noted = True
            self.store.compare_set(_KEY, "", str(step + 2))
        return self.store.check([_KEY]) and int(self.store.get(_KEY)) <= step
