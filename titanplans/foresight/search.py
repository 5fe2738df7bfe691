"""`Search`: the fastest layouts of a job that fit the memory of the GPUs.

Few layouts are rehearsed. The plan and the batch exclude some. A rehearsal of one sequence without a pipeline predicts the
approximate time and memory of all layouts with the same tensor, context and expert parallelism and recomputation. Often a
bound shows that such a rehearsal is not needed: the arithmetic of a step is the same in all layouts, collectives in line
grow with the degree, and the idle time of a pipeline grows with its number of stages.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from titanplans.errors import UserError
from titanplans.foresight.bounds import Bounds, Kind
from titanplans.foresight.forecast import Forecast
from titanplans.foresight.hardware import Gpu
from titanplans.foresight.layouts import MODES, Excluded, JobLayout
from titanplans.foresight.predict import LayoutSample, PipelineShape, batches_of
from titanplans.foresight.time import UPDATE
from titanplans.plan.degrees import Degrees

WORTHWHILE = 1.3
"""Layouts that take more than this many times as long as the fastest one are not searched for."""


class Rehearsals(Protocol):
    """Rehearses layouts in other processes. If a layout can't be run, its result is a UserError that says why."""

    def sample(self, layout: JobLayout) -> Future[LayoutSample]:
        """Begin to sample a layout."""

    def forecast(self, layout: JobLayout) -> Future[Forecast]:
        """Begin to forecast a layout."""


class Predicted(NamedTuple):
    """A layout that may fit, with an approximate time."""

    layout: JobLayout
    seconds: float
    sample: LayoutSample


class Estimated(NamedTuple):
    """A layout that fits, with its forecast."""

    layout: JobLayout
    seconds: float
    """Seconds of a step."""
    forecast: Forecast
    """The forecast of a step with at most two batches of the layout."""

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
        found: the fastest layouts that fit, in order; after `run` at least `count` of them, if so many fit and take at most
            WORTHWHILE times as long as the fastest.
        excluded: other degrees and layouts, and why they are not among `found`.
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
    _in_forecast: list[Predicted] = field(default_factory=list)
    """The layouts that are being forecast."""
    _left: dict[Kind, list[Degrees]] = field(default_factory=dict)
    """The degrees of each kind that is not sampled yet."""
    _in_sample: dict[Kind, list[Degrees]] = field(default_factory=dict)
    """The degrees of each kind that is being sampled."""
    _running: dict[Future[Any], Callable[[], None]] = field(default_factory=dict)
    """The running rehearsals, each with the function that takes its result into account."""

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
            while len(self._running) < self.at_once and self._start():
                pass
            if not self._running:
                break
            for task in wait(self._running, return_when=FIRST_COMPLETED).done:
                self._running.pop(task)()
        self.found.sort(key=lambda each: each.seconds)
        self._exclude_others()

    def _start(self) -> bool:
        """Start the rehearsal that promises the fastest layout; return False if no other one can be among the best."""
        promising, predicted = self._most_promising(), next(iter(self._predicted), None)
        if predicted is not None and predicted.seconds > self._limit():
            predicted = None
        if promising is not None and (predicted is None or promising[0] < predicted.seconds):
            self._sample(promising[1])
        elif predicted is not None:
            self._predicted.pop(0)
            self._forecast(predicted)
        else:
            return False
        return True

    def _sample(self, kind: Kind) -> None:
        of_kind = self._in_sample[kind] = self._left.pop(kind)
        each = _without_pipeline(of_kind[0])
        task = self.rehearsals.sample(JobLayout(each, kind.mode, 1, each.dp_replicate * each.dp_shard))

        def end() -> None:
            self._in_sample.pop(kind)
            try:
                sample = task.result()
            except UserError as error:
                self.excluded += [Excluded(each, str(error), kind.mode) for each in of_kind]
                return
            self._bounds.learn(kind, sample)
            for each in of_kind:
                self._predict(each, kind.mode, sample)

        self._running[task] = end

    def _forecast(self, predicted: Predicted) -> None:
        layout = predicted.layout
        self.progress(f"estimating {layout} with its batch")
        task = self.rehearsals.forecast(layout.with_batches(_estimated_batches(layout)))
        self._in_forecast.append(predicted)

        def end() -> None:
            self._in_forecast.remove(predicted)
            try:
                forecast = task.result()
            except UserError as error:
                self.excluded.append(Excluded(layout.degrees, str(error), layout.mode))
                return
            # An allocator that has to return memory to the GPU stops the step each time.
            if forecast.retries(self.expandable) != 0:
                self._predict_smaller(predicted, forecast)
            else:
                seconds = _seconds(layout, forecast, _estimated_batches(layout))
                self.found.append(Estimated(layout, seconds, forecast))
                self.progress(f"{layout}: {seconds:.2f} s a step")

        self._running[task] = end

    def _most_promising(self) -> tuple[float, Kind] | None:
        """Return the kind to sample next, and the bound for which it is chosen; None: no kind is worth sampling now."""
        limit = self._limit()
        bounds = {
            kind: min(self._bounds.seconds(each, kind) for each in some) for kind, some in self._left.items()
        }
        possible = [kind for kind, bound in bounds.items() if bound < math.inf and bound <= limit]
        # Among equal bounds, kinds that shard over fewer ranks come first, then kinds that recompute less.
        for kind in sorted(possible, key=lambda kind: (bounds[kind], kind.tp * kind.cp, *_order(kind))):
            probes = [self._probe(axis) for axis in kind.axes if not self._bounds.knows(axis)]
            if not probes:
                return bounds[kind], kind
            for probe in probes:
                if probe in self._left:
                    return bounds[kind], probe
        return None

    def _probe(self, axis: str) -> Kind | None:
        """Return the kind that shards by this axis alone, with the least degree, which bounds higher degrees."""
        alone = [kind for kind in (*self._left, *self._in_sample) if kind.axes == (axis,)]
        return min(alone, key=_order, default=None)

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
        """The time above which a layout is not among the best, as far as layouts are known; infinite if none is known."""
        known = sorted(each.seconds for each in (*self.found, *self._predicted, *self._in_forecast))
        if not known:
            return math.inf
        return min(known[self.count - 1] if len(known) >= self.count else math.inf, known[0] * WORTHWHILE)

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
            else:  # `found` is not empty, since the search goes on until a layout is found or none that may fit is left
                slower = max(0.0, seconds / self.found[0].seconds - 1)
                why = f"{about} {slower:.0%} slower: {_reason(degrees)}"
            self.excluded.append(Excluded(degrees, why))


def _order(kind: Kind) -> tuple[int, Kind]:
    return MODES.index(kind.mode), kind


def _without_pipeline(degrees: Degrees) -> Degrees:
    """Return the degrees with which FSDP shards over the ranks of all stages."""
    return replace(degrees, dp_shard=degrees.dp_shard * degrees.pp, pp=1)


def _estimated_batches(layout: JobLayout) -> int:
    """Return how many batches of a step are rehearsed; the others take as long, and need no more memory."""
    return min(layout.batches, 1 if layout.degrees.pp > 1 else 2)


def _seconds(layout: JobLayout, forecast: Forecast, batches: int) -> float:
    """Return the seconds of a step of `layout`, from the forecast of a step with `batches` batches of the same size."""
    update = forecast.ranks[0].time.parts.get(UPDATE, 0.0)
    return (forecast.seconds - update) * layout.batches / batches + update


def _reason(degrees: Degrees) -> str:
    reasons = {
        "a pipeline idles": degrees.pp > 1,
        "its collectives are in line": degrees.tp > 1 or degrees.cp > 1 or degrees.ep > 1,
    }
    return " and ".join(reason for reason, holds in reasons.items() if holds) or "more is recomputed"
