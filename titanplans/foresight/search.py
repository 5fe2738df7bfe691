"""`Search`: the fastest layouts of a job that fit the memory of the GPUs.

Few layouts are rehearsed. The plan and the batch refuse some. A rehearsal of one sequence without a pipeline tells nearly
the time and memory of all layouts with the same tensor, context and expert parallelism and recomputation. And where there is
no such rehearsal, a bound often shows that none is needed: the arithmetic of a step is the same in all layouts, collectives
in line grow with the degree, and a pipeline idles by its number of stages.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from titanplans.errors import UserError
from titanplans.foresight.bounds import Bounds, Kind
from titanplans.foresight.forecast import Forecast
from titanplans.foresight.hardware import Gpu
from titanplans.foresight.layouts import MODES, Excluded, JobLayout
from titanplans.foresight.predict import LayoutSample, PipelineShape, batches_of
from titanplans.foresight.time import UPDATE
from titanplans.plan.degrees import Degrees


class Rehearsals(Protocol):
    """Rehearses layouts in other processes. If a layout can't be run, its result is a UserError that says why."""

    def sample(self, layout: JobLayout) -> Future[LayoutSample]:
        """Begin to sample a layout."""

    def forecast(self, layout: JobLayout) -> Future[Forecast]:
        """Begin to forecast a layout."""


class Predicted(NamedTuple):
    """A layout that may fit, with a time that is nearly right."""

    layout: JobLayout
    seconds: float
    sample: LayoutSample


class Estimated(NamedTuple):
    """A layout that fits, with its forecast."""

    layout: JobLayout
    seconds: float
    """Seconds of a step."""
    forecast: Forecast
    """That of a step with at most two batches of the layout."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.layout.sequences * self.forecast.seq_len / self.seconds / self.forecast.gpus

    @property
    def mfu(self) -> float:
        """As `Forecast.mfu`."""
        return self.forecast.mfu * self.tokens_per_second / self.forecast.tokens_per_second


@dataclass
class Search:
    """Rehearses layouts until no other one can be among the best.

    Args:
        gpu: the GPUs.
        sequences: the sequences of a step.
        rehearsals: rehearses layouts.
        pipelines: the stages by the degree of pipeline parallelism, for each degree above 1.
        expandable: whether torch's allocator uses expandable segments.
        count: how many of the best are wanted.
        at_once: how many layouts are sampled at the same time.
        progress: is told what is estimated.

    Attributes:
        found: the fastest layouts that fit, in order; after `run` at least `count` of them, if so many fit.
        excluded: the others that were met, and why they are not among `found`.
    """

    gpu: Gpu
    sequences: int
    rehearsals: Rehearsals
    pipelines: Mapping[int, PipelineShape] = field(default_factory=dict)
    expandable: bool = False
    count: int = 5
    at_once: int = 2
    progress: Callable[[str], None] = lambda text: None
    found: list[Estimated] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)
    _predicted: list[Predicted] = field(default_factory=list)
    """The layouts that were predicted and not forecast, the fastest first."""
    _left: dict[Kind, list[Degrees]] = field(default_factory=dict)
    """The degrees that are not estimated yet."""

    def __post_init__(self) -> None:
        self._bounds = Bounds(self.gpu, self.sequences, self.pipelines)

    def run(self, degrees: Iterable[Degrees]) -> None:
        """Find the best layouts with these degrees."""
        by_kind: dict[Kind, list[Degrees]] = defaultdict(list)
        for each in degrees:
            for mode in MODES:
                by_kind[Kind(each.tp, each.cp, each.ep, mode)].append(each)
        self._left = dict(by_kind)
        while True:
            self._sample()
            if not self._forecast():
                break
        self._exclude_others()

    def _sample(self) -> None:
        """Sample kinds, the most promising ones first, until no other one can be among the best."""
        running: dict[Future[LayoutSample], tuple[Kind, list[Degrees]]] = {}
        while True:
            while len(running) < self.at_once and (kind := self._most_promising()) is not None:
                of_kind = self._left.pop(kind)
                each = _without_pipeline(of_kind[0])
                layout = JobLayout(each, kind.mode, 1, each.dp_replicate * each.dp_shard)
                running[self.rehearsals.sample(layout)] = kind, of_kind
            if not running:
                break
            for task in wait(running, return_when=FIRST_COMPLETED).done:
                kind, of_kind = running.pop(task)
                try:
                    sample = task.result()
                except UserError as error:
                    self.excluded += [Excluded(each, str(error), kind.mode) for each in of_kind]
                    continue
                self._bounds.learn(kind, sample)
                for each in of_kind:
                    self._predict(each, kind.mode, sample)

    def _most_promising(self) -> Kind | None:
        """Return the kind whose layouts have the lowest bound; None: no kind can be among the best."""
        limit = self._limit()
        bounds = {
            kind: min(self._bounds.seconds(each, kind) for each in some) for kind, some in self._left.items()
        }
        possible = [kind for kind, bound in bounds.items() if bound < math.inf and bound <= limit]
        # Of equal bounds first what shards a tensor over the fewest ranks, and what recomputes the least.
        return min(
            possible,
            key=lambda kind: (bounds[kind], kind.tp * kind.cp, MODES.index(kind.mode), kind),
            default=None,
        )

    def _predict(self, degrees: Degrees, mode: str, sample: LayoutSample) -> None:
        """Add the layout with the largest batch that fits, by `sample`."""
        batches, pipeline = self._batches(degrees), self.pipelines.get(degrees.pp)
        if pipeline is None:
            if sample.live > self.gpu.usable:
                self._exclude(degrees, mode, sample.live, "with batches of 1")
                return
            batches = [each for each in batches if each == 1 or sample.memory(each) <= self.gpu.usable]
        elif not batches:
            ranks = degrees.dp_replicate * degrees.dp_shard
            why = f"no number of the {self.sequences // ranks} sequences of a data-parallel rank suits the schedule"
            self.excluded.append(Excluded(degrees, why, mode))
            return
        elif (needed := sample.memory_of_stage(degrees, pipeline)) > self.gpu.usable:
            self._exclude(degrees, mode, needed, "on the first stage, by a rehearsal without a pipeline")
            return
        self._add_predicted(JobLayout(degrees, mode, batches[-1], self.sequences), sample)

    def _add_predicted(self, layout: JobLayout, sample: LayoutSample) -> None:
        seconds = sample.seconds(layout, self.pipelines.get(layout.degrees.pp))
        self._predicted.append(Predicted(layout, seconds, sample))
        self._predicted.sort(key=lambda each: each.seconds)
        self.progress(f"{layout}: about {seconds:.2f} s a step")

    def _batches(self, degrees: Degrees) -> list[int]:
        return batches_of(degrees, self.sequences, self.pipelines.get(degrees.pp))

    def _exclude(self, degrees: Degrees, mode: str, needed: float, where: str) -> None:
        self.excluded.append(Excluded(degrees, f"does not fit: {needed / 2**30:.0f} GiB {where}", mode))

    def _limit(self) -> float:
        """The time of the last of the best by what is known; infinite while there are fewer."""
        known = sorted(each.seconds for each in (*self.found, *self._predicted))
        return known[self.count - 1] if len(known) >= self.count else math.inf

    def _forecast(self) -> bool:
        """Forecast the predicted layouts that are among the best; return False if there are none."""
        limit = self._limit()
        chosen = [each for each in self._predicted if each.seconds <= limit]
        if not chosen:
            return False
        self.progress(f"estimating {len(chosen)} of the best with their batch")
        self._predicted = self._predicted[len(chosen) :]
        tasks = {
            self.rehearsals.forecast(each.layout.with_batches(_estimated_batches(each.layout))): each
            for each in chosen
        }
        for task, each in tasks.items():
            layout = each.layout
            try:
                forecast = task.result()
            except UserError as error:
                self.excluded.append(Excluded(layout.degrees, str(error), layout.mode))
                continue
            # An allocator that has to return memory to the GPU stops the step each time.
            if forecast.retries(self.expandable) != 0:
                self._predict_smaller(each, forecast)
            else:
                seconds = _seconds(layout, forecast, _estimated_batches(layout))
                self.found.append(Estimated(layout, seconds, forecast))
                self.progress(f"{layout}: {seconds:.2f} s a step")
        self.found.sort(key=lambda each: each.seconds)
        return True

    def _predict_smaller(self, each: Predicted, forecast: Forecast) -> None:
        """Predict a layout that does not fit with a smaller batch."""
        layout = each.layout
        if smaller := [batch for batch in self._batches(layout.degrees) if batch < layout.batch]:
            # The memory of most schedules hardly depends on the number of micro batches, so the fewest decide.
            batch = smaller[0 if layout.degrees.pp > 1 else -1]
            self._add_predicted(layout._replace(batch=batch), each.sample)
        else:
            reserved = forecast.reserved(self.expandable)
            self._exclude(layout.degrees, layout.mode, reserved, f"with batches of {layout.batch}")

    def _exclude_others(self) -> None:
        """Say why degrees that were not forecast are not among the best."""
        predicted: dict[Degrees, float] = {}
        for each in reversed(self._predicted):
            predicted[each.layout.degrees] = each.seconds
        bounds: dict[Degrees, float] = {}
        for kind, some in self._left.items():
            for degrees in some:
                bounds[degrees] = min(self._bounds.seconds(degrees, kind), bounds.get(degrees, math.inf))
        forecast = {each.layout.degrees for each in self.found}
        for degrees in sorted((predicted.keys() | bounds.keys()) - forecast, key=str):
            bound = bounds.get(degrees, math.inf)
            seconds, about = min((predicted.get(degrees, math.inf), "about"), (bound, "at least"))
            if math.isinf(seconds):
                why = "does not fit: one sequence needs too much memory, by rehearsals of other degrees"
            else:  # `found` has layouts, since all that may fit have been tried otherwise
                slower = max(0.0, seconds / self.found[0].seconds - 1)
                why = f"{about} {slower:.0%} slower: {_reason(degrees)}"
            self.excluded.append(Excluded(degrees, why))


def _without_pipeline(degrees: Degrees) -> Degrees:
    """Return the degrees with which FSDP shards over the ranks of all stages."""
    return replace(degrees, dp_shard=degrees.dp_shard * degrees.pp, pp=1)


def _estimated_batches(layout: JobLayout) -> int:
    """Return how many batches of a step are rehearsed; the others take as long, and need no more memory."""
    return min(layout.batches, 1 if layout.degrees.pp > 1 else 2)


def _seconds(layout: JobLayout, forecast: Forecast, batches: int) -> float:
    """Return the seconds of a step of `layout`, from the forecast of one with fewer `batches`, but of the same size."""
    update = forecast.ranks[0].time.parts.get(UPDATE, 0.0)
    return (forecast.seconds - update) * layout.batches / batches + update


def _reason(degrees: Degrees) -> str:
    reasons = {
        "a pipeline idles": degrees.pp > 1,
        "its collectives are in line": degrees.tp > 1 or degrees.cp > 1,
    }
    return " and ".join(reason for reason, holds in reasons.items() if holds) or "more is recomputed"
