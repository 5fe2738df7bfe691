"""When the stages of a pipeline compute in a training step, measured on each of its ranks.

Times of several ranks need one clock. Ranks on the CPUs of one machine have it. Elsewhere each counts from the end of a
barrier before the step, which ranks leave within the time of a message of each other.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from titanplans.parallel.pipeline.timeline import Span, Timeline
from titanplans.split.stages.schedules import Action, Kind
from titanplans.training.pipeline.stage import ScheduledStage

_KINDS: dict[str, Kind] = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward_weight",
}
"""By torch's methods of a stage; the second computes the gradients of inputs alone if it is told so."""


class StageTimes:
    """The times of the stages of this process, on a GPU by events of its stream, which do not wait for it."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None):
        self._group, self._on_gpu = group, device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any]] = []
        dist.barrier(group)
        self._zero = self._now()

    def watch(self, stage: ScheduledStage, method: str) -> Callable[..., Any]:
        """Return `method` of `stage`, noting when it begins and ends."""
        return partial(self._timed, stage.stage_index, _KINDS[method], getattr(stage, method))

    def _timed(
        self, stage: int, kind: Kind, method: Callable[..., Any], microbatch: int, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("full_backward") is False:
            kind = "backward_input"
        begin = self._now()
        output = method(microbatch, *args, **kwargs)
        self._marks.append((Action(stage, kind, microbatch), begin, self._now()))
        return output

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def gather(self) -> Timeline:
        """Return what all ranks of the pipeline measured, in seconds; each of them calls this."""
        if self._on_gpu:
            torch.cuda.synchronize()
            clock, zero = None, 0.0
            own = [
                Span(action, *(self._zero.elapsed_time(at) / 1e3 for at in ends))
                for action, *ends in self._marks
            ]
        else:
            clock, zero = socket.gethostname(), self._zero
            own = [Span(*mark) for mark in self._marks]
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, (clock, zero, own), group=self._group)
        if clock is not None and all(other == clock for other, _, _ in found):
            return Timeline(tuple(tuple(spans) for _, _, spans in found))
        return Timeline(
            tuple(
                tuple(span._replace(start=span.start - zero, end=span.end - zero) for span in spans)
                for _, zero, spans in found
            )
        )


@contextmanager
def measure(stages: Sequence[ScheduledStage]) -> Iterator[StageTimes]:
    """Measure the computations of `stages`, those of this process, inside; every rank of the pipeline does so."""
    times = StageTimes(stages[0].device, stages[0].group)
    for stage in stages:
        vars(stage).update({method: times.watch(stage, method) for method in _KINDS})
    try:
        yield times
    finally:
        for stage in stages:
            for method in _KINDS:
                del vars(stage)[method]
