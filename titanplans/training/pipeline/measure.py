"""When the stages of a pipeline compute in a training step, measured on each of its ranks.

Each rank counts from the end of a barrier before the step, which ranks leave within the time of a message of each other.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from titanplans.parallel.pipeline.timeline import Span, Timeline
from titanplans.split.objects import of_all
from titanplans.split.stages.schedules import Action, Kind
from titanplans.torch_private.swapped import swapped
from titanplans.training.pipeline.stage import ScheduledStage

_KINDS: dict[str, Kind] = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward_weight",
}
"""By torch's methods of a stage; the second computes the gradients of inputs alone if it is told so."""


class StageTimes:
    """The times of `stages`, those of this process; on a GPU by events of its stream, which do not wait for it."""

    def __init__(self, stages: Sequence[ScheduledStage]):
        self._group, self._on_gpu = stages[0].group, stages[0].device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any]] = []
        dist.barrier(self._group)
        self._zero = self._now()

    def timed(self, stage: ScheduledStage, name: str, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        """Call the method called `name` of `stage`, and note when it begins and ends."""
        kind = "backward_input" if kwargs.get("full_backward") is False else _KINDS[name]
        begin = self._now()
        output = getattr(type(stage), name)(stage, microbatch, *args, **kwargs)
        self._marks.append((Action(stage.stage_index, kind, microbatch), begin, self._now()))
        return output

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        return self._zero.elapsed_time(mark) / 1e3 if self._on_gpu else mark - self._zero

    def gather(self) -> Timeline:
        """Return what all ranks of the pipeline measured, in seconds; each of them calls this."""
        if self._on_gpu:
            torch.cuda.synchronize()
        own = tuple(
            Span(action, self._seconds(begin), self._seconds(end)) for action, begin, end in self._marks
        )
        return Timeline(tuple(of_all(own, self._group)))


@contextmanager
def measure(stages: Sequence[ScheduledStage]) -> Iterator[StageTimes]:
    """Measure the computations of `stages`, those of this process, inside; every rank of the pipeline does so."""
    times = StageTimes(stages)
    with ExitStack() as stack:
        for stage, name in product(stages, _KINDS):
            stack.enter_context(swapped(stage, name, partial(times.timed, stage, name)))
        yield times
