"""The pipeline's section in the parallelism report: stages, and computed and measured timelines with their idle fraction."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanplans.disk import name_file_in_errors
from titanplans.modeling import flops_of_blocks
from titanplans.parallel.pipeline.picture import FILE, MEASURED_FILE, as_svg, as_text
from titanplans.parallel.pipeline.timeline import UNITS, Span, Timeline, timeline
from titanplans.split.decoder import is_present
from titanplans.split.objects import gather_objects
from titanplans.split.stages.schedules import Action, orders, stages_of_ranks
from titanplans.split.stages.stages import Stages
from titanplans.training.pipeline.stage import ScheduledStage, untimed

_MAX_LOGGED_LINES = 11
"""A timeline with more lines than this is written to a file, but not logged."""


def describe(model: Any, stages: Stages, schedule: str, ranks: int, seq_len: int) -> dict[str, Any]:
    """Return the report's values for the stages of `model`, which is the unsplit Hugging Face model, on meta."""
    stages_by_rank, names = stages_of_ranks(schedule, ranks, len(stages)), stages.decoder.names
    cost = flops_of_blocks(model, stages.decoder, seq_len)
    descriptions = []
    for index, absent in enumerate(stages.absent):
        first, last = stages.bounds[index : index + 2]
        # The first stage also has the embedding, and the last one the head.
        ends = cost.first * (index == 0) + cost.last * (index == len(stages) - 1)
        descriptions.append(
            {
                "rank": next(rank for rank, indices in enumerate(stages_by_rank) if index in indices),
                "blocks": [names[first], names[last - 1]],
                "tensors_received": len(stages.trace.crossing(first)),
                "parameters": _count_parameters(model, absent),
                "shared_parameters": sorted(stages.unsplit_names(index).values()),
                "flops_per_token": sum(cost.blocks[first:last]) + ends,
            }
        )
    return {"schedule": schedule, "ranks": ranks, "stages": descriptions}


def _count_parameters(model: nn.Module, absent: Sequence[str]) -> int:
    named = model.named_parameters(remove_duplicate=False)
    return sum({id(p): p.numel() for name, p in named if is_present(name, absent)}.values())


class PipelineReport:
    """Computes, measures and draws the pipeline of a job.

    Args:
        description: the result of `describe`.
        stages: returns this rank's stages for training, which exist after the first step.
        micro_batches: number of micro batches in a batch.
        folder: the folder that the pictures are written to.

    Attributes:
        values: the section "pipeline" of the parallelism report.
    """

    def __init__(
        self,
        description: dict[str, Any],
        stages: Callable[[], Sequence[ScheduledStage]],
        micro_batches: int,
        folder: Path,
    ):
        stage_values, schedule = description["stages"], description["schedule"]
        self._stages, self._folder, self._title = stages, folder, f"{schedule}, {micro_batches} micro batches"
        # The time of a computation is proportional to its FLOPs, and sending takes no time.
        self._computed = timeline(
            orders(schedule, description["ranks"], len(stage_values), micro_batches),
            lambda kind, stage: UNITS[kind] * stage_values[stage]["flops_per_token"],
        )
        self._pictures = {FILE: (self._computed, self._title)}
        self.values = description | {
            "micro_batches": micro_batches,
            "idle_fraction": self._computed.idle_fraction,
            "measured": None,
        }

    def text(self) -> list[str]:
        """Return the computed timeline as lines of text, or, if there are too many, its title and the picture's path."""
        title, *lines = as_text(self._computed, self._title).splitlines()
        if len(lines) > _MAX_LOGGED_LINES:
            return [f"{title}: {self._folder / FILE}"]
        return [f"{title}, if stages take time in proportion to their FLOPs and sending takes none", *lines]

    def draw(self) -> None:
        """Write the computed timeline as a picture, and the measured one once there is one."""
        for file, (drawn_timeline, title) in self._pictures.items():
            with name_file_in_errors(self._folder / file):
                (self._folder / file).write_text(as_svg(drawn_timeline, title))

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Time the training step in the body. It must not be the first step, which creates the stages. Collective."""
        with measure(self._stages()) as times:
            yield
        measured = times.gather()
        self.values["measured"] = {
            "step": step,
            "idle_fraction": measured.idle_fraction,
            "seconds": measured.duration,
        }
        self._pictures[MEASURED_FILE] = measured, f"{self._title}, measured in step {step}"


class StageTimes:
    """Records when the computations of this rank's stages begin and end."""

    def __init__(self, stages: Sequence[ScheduledStage]):
        self._group, self._on_gpu = stages[0].group, stages[0].device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any]] = []
        # Each rank counts time from the end of a barrier. All ranks leave the barrier within the time that a message
        # takes, so their times can be compared.
        dist.barrier(self._group)
        self._zero = self._now()

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Record when the computation in the body begins and ends."""
        begin = self._now()
        yield
        self._marks.append((action, begin, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        # An event is recorded in the stream, without waiting for it.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        return self._zero.elapsed_time(mark) / 1e3 if self._on_gpu else mark - self._zero

    def gather(self) -> Timeline:
        """Return the timeline of all pipeline ranks, in seconds. Collective."""
        if self._on_gpu:
            torch.cuda.synchronize()
        spans = tuple(
            Span(action, self._seconds(begin), self._seconds(end)) for action, begin, end in self._marks
        )
        return Timeline(tuple(gather_objects(spans, self._group)))


@contextmanager
def measure(stages: Sequence[ScheduledStage]) -> Iterator[StageTimes]:
    """Time the computations of this rank's `stages` in the body. Collective over the pipeline ranks."""
    times = StageTimes(stages)
    for stage in stages:
        stage.timing = times.timing
    try:
        yield times
    finally:
        for stage in stages:
            stage.timing = untimed
