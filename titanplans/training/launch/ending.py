"""On a signal, all ranks stop after the same step, which they agree on through the process group's store.

A signal reaches some ranks earlier than others, or one alone, and a checkpoint is saved by all of them at one step. The
first rank that gets it writes the step after next into the store. No rank ends that step before it can read this, since the
collectives of a step make each rank wait for all others. On an accelerator the process runs ahead, so it first waits for the
step before the last.
"""

from collections.abc import Callable

import torch
from torchtitan.tools.utils import device_type

from titanplans.torch_private.distributed import default_store

_KEY = "titanplans/last_step"


class Ending:
    """Tells after each step whether it is the last.

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
