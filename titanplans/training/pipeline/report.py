"""A job's pipeline in its parallelism report: stages, the idle share computed and measured, and pictures of both.

The computed timeline is that of the schedule's order with stages as long as their FLOPs; sending takes no time in it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanplans.disk import naming
from titanplans.modeling import flops_of_blocks
from titanplans.parallel.pipeline.picture import FILE, MEASURED_FILE, as_svg, as_text
from titanplans.parallel.pipeline.timeline import UNITS, Span, Timeline, timeline
from titanplans.split.decoder import is_present
from titanplans.split.objects import of_all
from titanplans.split.stages.schedules import Action, orders, stages_of_ranks
from titanplans.split.stages.stages import Stages
from titanplans.training.pipeline.stage import ScheduledStage, untimed

_ROWS = 11
"""The most stages whose picture is logged."""


def describe(model: Any, stages: Stages, schedule: str, ranks: int, seq_len: int) -> dict[str, Any]:
    """Return the report's part on the stages of `model`, a whole one on meta."""
    by_rank, names = stages_of_ranks(schedule, ranks, len(stages)), stages.decoder.names
    cost = flops_of_blocks(model, stages.decoder, seq_len)
    rows = []
    for at, absent in enumerate(stages.absent):
        first, last = stages.bounds[at : at + 2]
        ends = cost.first * (at == 0) + cost.last * (at == len(stages) - 1)
        rows.append(
            {
                "rank": next(rank for rank, numbers in enumerate(by_rank) if at in numbers),
                "blocks": [names[first], names[last - 1]],
                "tensors_received": len(stages.trace.crossing(first)),
                "parameters": _held(model, absent),
                "shared_parameters": sorted(stages.unsplit_names(at).values()),
                "flops_per_token": sum(cost.blocks[first:last]) + ends,
            }
        )
    return {"schedule": schedule, "ranks": ranks, "stages": rows}


def _held(model: nn.Module, absent: Sequence[str]) -> int:
    named = model.named_parameters(remove_duplicate=False)
    return sum({id(p): p.numel() for name, p in named if is_present(name, absent)}.values())


class PipelineReport:
    """Computes, measures and draws the pipeline of a job.

    Args:
        description: what `describe` returned.
        stages: returns the stages of this process that train, once they have been made.

    Attributes:
        values: the part of the parallelism report.
    """

    def __init__(
        self,
        description: dict[str, Any],
        stages: Callable[[], Sequence[ScheduledStage]],
        micro_batches: int,
        folder: Path,
    ):
        rows, schedule = description["stages"], description["schedule"]
        self._stages, self._folder, self._name = stages, folder, f"{schedule}, {micro_batches} micro batches"
        self._computed = timeline(
            orders(schedule, description["ranks"], len(rows), micro_batches),
            lambda kind, stage: UNITS[kind] * rows[stage]["flops_per_token"],
        )
        self._drawn = {FILE: (self._computed, self._name)}
        self.values = description | {
            "micro_batches": micro_batches,
            "idle_share": self._computed.idle_share,
            "measured": None,
        }

    def text(self) -> list[str]:
        """Return the computed timeline as lines of text; its title alone where there are many stages."""
        title, *rows = as_text(self._computed, self._name).splitlines()
        if len(rows) > _ROWS:
            return [f"{title}: {self._folder / FILE}"]
        return [f"{title}, if stages take the time of their FLOPs and sending none", *rows]

    def draw(self) -> None:
        """Write the timelines that are known as pictures."""
        for file, (drawn, name) in self._drawn.items():
            with naming(self._folder / file):
                (self._folder / file).write_text(as_svg(drawn, name))

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Measure the training step that runs inside, whose `stages` have run before; every rank does so."""
        with measure(self._stages()) as times:
            yield
        found = times.gather()
        self.values["measured"] = {
            "step": step,
            "idle_share": found.idle_share,
            "seconds": found.duration,
        }
        self._drawn[MEASURED_FILE] = found, f"{self._name}, measured in step {step}"


class StageTimes:
    """The times of `stages`, those of this process; on a GPU by events of its stream, which do not wait for it.

    Each rank counts from the end of a barrier before the step, which ranks leave within the time of a message of each other.
    """

    def __init__(self, stages: Sequence[ScheduledStage]):
        self._group, self._on_gpu = stages[0].group, stages[0].device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any]] = []
        dist.barrier(self._group)
        self._zero = self._now()

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Note when the computation inside begins and ends."""
        begin = self._now()
        yield
        self._marks.append((action, begin, self._now()))

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
    for stage in stages:
        stage.timing = times.timing
    try:
        yield times
    finally:
        for stage in stages:
            stage.timing = untimed
