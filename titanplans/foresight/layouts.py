"""`Search`: the layouts of a job on a number of GPUs, the fastest first.

A layout is a choice of degrees, of what is recomputed, and of the batch of a rank. Most of them are never rehearsed: the
plan and the batch refuse some, and others can't be among the best. For the arithmetic of a step is the same in all layouts,
collectives in line grow with the degree, and a pipeline idles by its number of stages.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from titanplans.errors import UserError
from titanplans.foresight.forecast import Forecast
from titanplans.foresight.hardware import Gpu
from titanplans.foresight.memory import COMMUNICATION, GATHERED
from titanplans.foresight.rehearsal import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS
from titanplans.foresight.time import ATTENTION, COPIES, FOR_FSDP, FOR_HOST, KERNELS, OTHERS, PRODUCTS, UPDATE
from titanplans.plan.degrees import Degrees

MODES = ("none", "selective", "full")
"""What is recomputed, from the fastest and largest to the slowest and smallest."""
_SLACK = 0.99
"""A bound counts as this part of itself: products of smaller tensors take other times, and FSDP's traffic is not in it."""
_MICRO_BATCHES = 4
"""In a pipeline, at most this number of micro batches a stage is tried: more of them idle little less."""
_AT_ONCE = 2
"""Layouts that are estimated at the same time, in a process each."""
_CONSTANT = (WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS, GATHERED, COMMUNICATION)
"""The parts of the memory that do not depend on the batch."""


class JobLayout(NamedTuple):
    """A layout of a job."""

    degrees: Degrees
    mode: str
    """What is recomputed: activation_checkpoint.mode."""
    batch: int
    """training.local_batch_size"""
    sequences: int
    """training.global_batch_size"""

    def settings(self) -> dict[str, dict[str, int | str]]:
        """Return the keys of a job that set this layout, by section."""
        degrees = self.degrees
        recomputation: dict[str, int | str] = {"mode": self.mode}
        if self.mode == "selective":
            recomputation["selective_ac_option"] = "op"
        return {
            "training": {"local_batch_size": self.batch, "global_batch_size": self.sequences},
            "parallelism": {
                "data_parallel_shard_degree": degrees.dp_shard,
                "tensor_parallel_degree": degrees.tp,
                "context_parallel_degree": degrees.cp,
                "expert_parallel_degree": degrees.ep,
                "pipeline_parallel_degree": degrees.pp,
            },
            "activation_checkpoint": recomputation,
        }

    def __str__(self) -> str:
        return f"fsdp {self.degrees.dp_shard}, {self.degrees}, batch {self.batch}, recomputation {self.mode}"

    def options(self) -> list[str]:
        """Return the options of a job that set this layout, such as "training.local_batch_size=2"."""
        return [
            f"{section}.{key}={value}"
            for section, keys in self.settings().items()
            for key, value in keys.items()
        ]


class Excluded(NamedTuple):
    """Degrees or layouts that are not among the best, and why."""

    degrees: Degrees
    why: str
    mode: str | None = None
    """What is recomputed; None: whatever is."""

    @property
    def what(self) -> str:
        """What is excluded, in words."""
        return str(self.degrees) if self.mode is None else f"{self.degrees}, recomputation {self.mode}"

    @property
    def has_one_axis(self) -> bool:
        """Whether at most one of the degrees besides data parallelism is above 1."""
        degrees = self.degrees
        return sum(each > 1 for each in (degrees.tp, degrees.cp, degrees.ep, degrees.pp)) < 2


class Estimated(NamedTuple):
    """A layout that fits, with its forecast."""

    layout: JobLayout
    forecast: Forecast
    """If `is_exact`, that of a step with at most two batches of the layout; otherwise with one of the fewest sequences."""
    seconds: float
    """Seconds of a step."""
    is_exact: bool

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.layout.sequences * self.forecast.seq_len / self.seconds / self.forecast.gpus

    @property
    def mfu(self) -> float:
        """As `Forecast.mfu`."""
        return self.forecast.mfu * self.tokens_per_second / self.forecast.tokens_per_second


Evaluate = Callable[[Sequence[JobLayout]], list[Forecast | UserError]]
"""Returns the forecast of each layout, or why it can't be run."""


def candidates(gpus: int, sequences: int, replicas: int = 1) -> Iterator[Degrees | Excluded]:
    """Yield all degrees whose product is `gpus`, but 1 for experts. Those that the batch refuses come with the reason.

    Args:
        gpus: the number of GPUs.
        sequences: the sequences of a step.
        replicas: parallelism.data_parallel_replicate_degree.
    """
    shared = gpus // replicas
    for tp, cp, pp in product(_divisors(shared), repeat=3):
        if shared % (tp * cp * pp):
            continue
        degrees = Degrees(dp_replicate=replicas, dp_shard=shared // (tp * cp * pp), tp=tp, cp=cp, pp=pp)
        batches = degrees.dp_replicate * degrees.dp_shard
        if sequences % batches:
            yield Excluded(
                degrees, f"{sequences} sequences can't be divided by {batches} data-parallel ranks"
            )
        elif pp > sequences // batches:
            yield Excluded(
                degrees,
                f"a data-parallel rank has only {sequences // batches} sequences for {pp} stages",
            )
        else:
            yield degrees


def with_experts(degrees: Degrees, experts: bool) -> Iterator[Degrees]:
    """Yield `degrees` with each possible degree of expert parallelism; `experts`: whether the model has experts."""
    for ep in _divisors(degrees.dp_shard * degrees.cp * degrees.tp) if experts else (1,):
        if ep == 1 or ep % degrees.tp == 0:
            yield replace(degrees, ep=ep)


@dataclass
class Search:
    """Estimates layouts until no other one can be among the best.

    A layout is first estimated for one small batch, from which follow the largest batch that fits and nearly the time of a
    step. The best layouts are then estimated with their own batch.

    Args:
        gpu: the GPUs.
        sequences: the sequences of a step.
        evaluate: estimates layouts.
        expandable: whether torch's allocator uses expandable segments.
        count: how many of the best are wanted.
        progress: is told what is estimated.

    Attributes:
        found: the estimated layouts that fit, the fastest first. After `run` the first `count` of them are exact: they are
            estimated with their own batch.
        excluded: the others that were met, and why they are not among `found`.
    """

    gpu: Gpu
    sequences: int
    evaluate: Evaluate
    expandable: bool = False
    count: int = 5
    progress: Callable[[str], None] = lambda text: None
    found: list[Estimated] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)
    _arithmetic: dict[str, float] = field(default_factory=dict)
    """By what is recomputed: the seconds of a step without any waits and collectives, which are the same in all layouts."""
    _in_line: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By axis, the smallest degree that was estimated and the seconds of its collectives in line."""
    _busy: dict[tuple[int, int, int, str], float] = field(default_factory=dict)
    """By tp, cp, ep and what is recomputed: the seconds of a sequence without waits."""

    def run(self, degrees: Iterable[Degrees]) -> None:
        """Estimate layouts with these degrees."""
        left = {(each, mode) for each in degrees for mode in MODES}
        while left:
            choices = [
                each
                for each in sorted(left, key=self._order)[:_AT_ONCE]
                if self.bound(*each) <= self._limit()
            ]
            if not choices:
                break
            left -= set(choices)
            self._estimate(choices)
        self._estimate_exactly()
        for each in sorted({each for each, _ in left}, key=str):
            if self.found and not any(found.layout.degrees == each for found in self.found):
                bound = min(self.bound(each, mode) for mode in MODES if (each, mode) in left)
                slower = max(0.0, bound / self.found[0].seconds - 1)
                self.excluded.append(Excluded(each, f"at least {slower:.0%} slower: {_reason(each)}"))

    def _order(self, choice: tuple[Degrees, str]) -> tuple[float, ...]:
        """Of equal bounds first what shards the parameters over the most ranks, and what recomputes the least."""
        degrees, mode = choice
        return self.bound(*choice), -degrees.dp_shard, MODES.index(mode), degrees.ep, degrees.pp, degrees.cp

    def bound(self, degrees: Degrees, mode: str) -> float:
        """Return a time of a step that such layouts do not fall below; 0 if nothing is known."""
        whole = self._sequences_of_a_rank(degrees)
        of_one = self._busy.get((degrees.tp, degrees.cp, degrees.ep, mode))
        if of_one is not None:
            seconds = of_one * whole / degrees.pp
        else:
            known = [
                each for other, each in self._arithmetic.items() if MODES.index(other) <= MODES.index(mode)
            ]
            seconds = max(known, default=0.0) * _SLACK
            for axis, (smallest, of_smallest) in self._in_line.items():
                # A rank receives (degree - 1) / degree of a tensor that has `degree` times as many tokens.
                seconds += of_smallest * (getattr(degrees, axis) - 1) / (smallest - 1)
        return seconds * (1 + (degrees.pp - 1) / min(whole, _MICRO_BATCHES * degrees.pp))

    def _limit(self) -> float:
        """The time of the last of the best; infinite while there are fewer."""
        return self.found[self.count - 1].seconds if len(self.found) >= self.count else math.inf

    def _sequences_of_a_rank(self, degrees: Degrees) -> int:
        return self.sequences // (degrees.dp_replicate * degrees.dp_shard)

    def _estimate(self, choices: Sequence[tuple[Degrees, str]]) -> None:
        """Estimate these choices for a small batch, and add them with the largest one that fits."""
        small = [
            JobLayout(degrees, mode, degrees.pp, degrees.pp * degrees.dp_replicate * degrees.dp_shard)
            for degrees, mode in choices
        ]
        for layout, forecast in zip(small, self.evaluate(small), strict=True):
            degrees, whole = layout.degrees, self._sequences_of_a_rank(layout.degrees)
            if isinstance(forecast, UserError):
                self.excluded.append(Excluded(degrees, str(forecast), layout.mode))
                continue
            self._learn(layout, forecast, whole / layout.batch)
            if degrees.pp > 1:
                batches = [
                    each for each in _divisors(whole) if degrees.pp <= each <= _MICRO_BATCHES * degrees.pp
                ]
            else:
                batches = [
                    each for each in _divisors(whole) if self._memory(forecast, each) <= self.gpu.usable
                ]
            if forecast.retries(self.expandable) is None or not batches:
                reserved = forecast.reserved(self.expandable) / 2**30
                self.excluded.append(
                    Excluded(
                        degrees,
                        f"does not fit: {reserved:.0f} GiB with batches of {layout.batch}",
                        layout.mode,
                    )
                )
                continue
            chosen = layout._replace(batch=batches[-1], sequences=self.sequences)
            seconds = _seconds_from_small(chosen, forecast)
            self.progress(f"{chosen}: {seconds:.2f} s a step")
            self._add(Estimated(chosen, forecast, seconds, False))

    def _memory(self, forecast: Forecast, batch: int) -> float:
        """Return nearly the bytes that are reserved with `batch` sequences, from the forecast with one."""
        (rank,) = forecast.ranks
        constant = sum(rank.memory.parts.get(part, 0) for part in _CONSTANT)
        return constant + (forecast.reserved(self.expandable) - constant) * batch

    def _learn(self, layout: JobLayout, forecast: Forecast, steps: float) -> None:
        """Learn for `bound` from a forecast, `steps` of which are a step."""
        degrees = layout.degrees
        arithmetic = steps * min(
            sum(rank.time.parts.get(part, 0.0) for part in (PRODUCTS, ATTENTION, KERNELS, OTHERS))
            for rank in forecast.ranks
        )
        self._arithmetic[layout.mode] = min(self._arithmetic.get(layout.mode, math.inf), arithmetic)
        if degrees.pp > 1:
            return
        parts = forecast.ranks[0].time.parts
        self._busy[degrees.tp, degrees.cp, degrees.ep, layout.mode] = _of_sequences(parts)
        axes = [axis for axis in ("tp", "cp", "ep") if getattr(degrees, axis) > 1]
        if axes in (["tp"], ["cp"]):
            collectives = steps * sum(seconds for part, seconds in parts.items() if part.endswith("GPUs"))
            self._in_line.setdefault(axes[0], (getattr(degrees, axes[0]), collectives))

    def _estimate_exactly(self) -> None:
        """Estimate the best layouts with their batch, until the best are all estimated so."""
        while inexact := [each for each in self.found[: self.count] if not each.is_exact]:
            self.progress(f"estimating {len(inexact)} of the best with their batch")
            steps = [_with_batches(each.layout, _estimated_batches(each.layout)) for each in inexact]
            for each, forecast in zip(inexact, self.evaluate(steps), strict=True):
                self.found.remove(each)
                if isinstance(forecast, UserError):
                    self.excluded.append(Excluded(each.layout.degrees, str(forecast), each.layout.mode))
                elif forecast.retries(self.expandable) is not None:
                    seconds = _seconds(each.layout, forecast, _estimated_batches(each.layout))
                    self._add(Estimated(each.layout, forecast, seconds, True))
                else:
                    self._with_smaller_batch(each, forecast)

    def _with_smaller_batch(self, each: Estimated, forecast: Forecast) -> None:
        layout, whole = each.layout, self._sequences_of_a_rank(each.layout.degrees)
        smaller = [batch for batch in _divisors(whole) if layout.degrees.pp <= batch < layout.batch]
        if smaller:
            layout = layout._replace(batch=smaller[-1])
            self._add(Estimated(layout, each.forecast, _seconds_from_small(layout, each.forecast), False))
        else:
            reserved = forecast.reserved(self.expandable) / 2**30
            self.excluded.append(Excluded(layout.degrees, f"does not fit: {reserved:.0f} GiB", layout.mode))

    def _add(self, estimated: Estimated) -> None:
        self.found = sorted([*self.found, estimated], key=lambda each: each.seconds)


def _batches(layout: JobLayout) -> int:
    """Return the number of batches whose gradients a step accumulates."""
    return layout.sequences // (layout.batch * layout.degrees.dp_replicate * layout.degrees.dp_shard)


def _estimated_batches(layout: JobLayout) -> int:
    """Return how many batches of a step are estimated; the others take as long, and need no more memory."""
    return min(_batches(layout), 1 if layout.degrees.pp > 1 else 2)


def _with_batches(layout: JobLayout, batches: int) -> JobLayout:
    """Return `layout` with this number of batches in a step."""
    sequences = batches * layout.batch * layout.degrees.dp_replicate * layout.degrees.dp_shard
    return layout._replace(sequences=sequences)


def _seconds(layout: JobLayout, forecast: Forecast, batches: int) -> float:
    """Return the seconds of a step of `layout`, from the forecast of one with fewer `batches`, but of the same size."""
    update = forecast.ranks[0].time.parts.get(UPDATE, 0.0)
    return (forecast.seconds - update) * _batches(layout) / batches + update


def _seconds_from_small(layout: JobLayout, forecast: Forecast) -> float:
    """Return nearly the seconds of a step of `layout`, from the forecast of one small batch."""
    parts = forecast.ranks[0].time.parts
    update = parts.get(UPDATE, 0.0)
    if (pp := layout.degrees.pp) > 1:
        # The small batch has as many micro batches as there are stages.
        of_one = max(sum(rank.time.actions.values()) for rank in forecast.ranks) / pp
        return _batches(layout) * of_one * (layout.batch + pp - 1) + update
    waits, busy = parts.get(FOR_FSDP, 0.0) + parts.get(FOR_HOST, 0.0), _of_sequences(parts)
    # More sequences hide more of the collectives.
    waits = max(0.0, waits - (layout.batch - 1) * busy)
    return _batches(layout) * (layout.batch * busy + parts.get(COPIES, 0.0) + waits) + update


def _of_sequences(parts: Mapping[str, float]) -> float:
    """Return the seconds of those parts that grow with the sequences of a batch."""
    return sum(seconds for part, seconds in parts.items() if part not in (FOR_FSDP, FOR_HOST, COPIES, UPDATE))


def _reason(degrees: Degrees) -> str:
    reasons = {
        "a pipeline idles": degrees.pp > 1,
        "its collectives are in line": degrees.tp > 1 or degrees.cp > 1,
    }
    return " and ".join(reason for reason, holds in reasons.items() if holds) or "more is recomputed"


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
