"""`Bounds`: times that a step of a layout does not fall below, from samples of other layouts."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from titanplans.foresight.hardware import Gpu
from titanplans.foresight.layouts import MODES
from titanplans.foresight.predict import LayoutSample, PipelineShape, batches_of, weight_shards
from titanplans.foresight.time import ATTENTION, COPIES, KERNELS, OTHERS, PRODUCTS, seconds_of_byte
from titanplans.plan.degrees import Degrees

_TIME = 0.99
"""A bound counts as this part of itself, because other degrees have other latencies."""
_ARITHMETIC = 0.95
"""The same for arithmetic, because products of more or fewer tokens take other times."""
_MEMORY = 0.8
"""The same for the memory of a sequence, which other layouts may split into fewer bytes."""


class Kind(NamedTuple):
    """What a sample has in common with the layouts that follow from it."""

    tp: int
    cp: int
    ep: int
    mode: str
    """What is recomputed: activation_checkpoint.mode."""

    @property
    def axes(self) -> tuple[str, ...]:
        """By which of "tp", "cp" and "ep" it shards."""
        return tuple(axis for axis in ("tp", "cp", "ep") if getattr(self, axis) > 1)

    def does_no_more_than(self, other: "Kind") -> bool:
        """Whether it shards by no other axes than `other`, and recomputes no more."""
        return {*self.axes} <= {*other.axes} and MODES.index(self.mode) <= MODES.index(other.mode)


class Bounds:
    """Bounds of the time of a step, which become higher with each sample.

    Args:
        gpu: the GPUs.
        sequences: the sequences of a step.
        pipelines: the stages by the degree of pipeline parallelism, for each degree above 1.
    """

    def __init__(self, gpu: Gpu, sequences: int, pipelines: Mapping[int, PipelineShape]):
        self._gpu, self._sequences, self._pipelines = gpu, sequences, pipelines
        self._samples: dict[Kind, LayoutSample] = {}

    def learn(self, kind: Kind, sample: LayoutSample) -> None:
        """Take a sample into account."""
        self._samples[kind] = sample

    def seconds(self, degrees: Degrees, kind: Kind) -> float:
        """Return a time that a step of such layouts does not fall below; infinite if they don't fit the memory."""
        batches = batches_of(degrees, self._sequences, pipeline := self._pipelines.get(degrees.pp))
        largest = self._largest_batch(degrees, kind, pipeline)
        if not batches or largest < (1 if pipeline is None else pipeline.micro_batch):
            return math.inf
        in_line = max(
            sum(self._in_line(axis, kind) for axis in kind.axes), self._in_line_of_smaller_degrees(kind)
        )
        seconds = self._arithmetic(kind) + in_line
        host = min((sample.time.host for sample in self._samples.values()), default=0.0)
        if pipeline is None:
            fewest = math.ceil(batches[-1] / largest)
            traffic, copies = self._of_weights(degrees)
            return max(seconds + copies * fewest, max(traffic, _TIME * host) * fewest)
        micro_batches = batches[-1] // pipeline.micro_batch
        seconds *= 1 + (pipeline.bubble(micro_batches) or 0.0) / micro_batches
        sums = min(
            (sample.sums_of_gradients(degrees, pipeline) for sample in self._samples.values()), default=0
        )
        ranks = degrees.dp_replicate * degrees.dp_shard
        steps = self._sequences // (ranks * batches[-1])
        of_host = _TIME * host / degrees.pp * micro_batches * steps
        return max(seconds + sums * steps * (micro_batches - 1), of_host)

    def knows(self, axis: str) -> bool:
        """Whether a sample tells the collectives of "tp", "cp" or "ep"."""
        return any(kind.axes == (axis,) for kind in self._samples)

    def _arithmetic(self, kind: Kind) -> float:
        """Return the seconds without waits and collectives, by samples that do no more.

        Layouts that shard by the same axes and recompute the same take nearly the same, and another axis adds operators.
        """
        least: dict[tuple[tuple[str, ...], str], float] = {}
        for other, sample in self._samples.items():
            if other.does_no_more_than(kind):
                parts, alike = sample.time.parts, (other.axes, other.mode)
                seconds = sum(parts.get(part, 0.0) for part in (PRODUCTS, ATTENTION, KERNELS, OTHERS))
                seconds *= self._sequences / sample.sequences
                least[alike] = min(least.get(alike, math.inf), seconds)
        return _ARITHMETIC * max(least.values(), default=0.0)

    def _in_line(self, axis: str, kind: Kind) -> float:
        """Return the seconds of the collectives of an axis, by the sample that shards by it alone, over the fewest ranks."""
        degree = getattr(kind, axis)
        of_axis = [
            (getattr(other, axis), sample)
            for other, sample in self._samples.items()
            if other.axes == (axis,) and other.does_no_more_than(kind)
        ]
        if not of_axis:
            return 0.0
        smallest, sample = min(of_axis, key=lambda item: item[0])
        apart = kind.tp if axis == "cp" else 1

        def scale(operation: str) -> float:
            of_byte, of_byte_in_sample = (
                seconds_of_byte(operation, group, self._gpu)
                for group in (range(0, degree * apart, apart), range(smallest))
            )
            # A rank has `degree` times as many sequences, and receives (degree - 1) / degree of their tokens. In an
            # all-to-all it exchanges only its own tokens, which are as many in all layouts.
            received = (degree - 1) / (smallest - 1)
            if operation == "all_to_all":
                received *= smallest / degree
            return received * max(1.0, of_byte / of_byte_in_sample)

        seconds = sum(
            seconds * scale("all_to_all" if part.startswith("all-to-all") else "all_gather")
            for part, seconds in sample.in_line.items()
        )
        return _TIME * seconds * self._sequences / sample.sequences

    def _in_line_of_smaller_degrees(self, kind: Kind) -> float:
        """Return the most seconds of collectives in samples of which no degree is larger: higher degrees take no less."""
        seconds = (
            sum(sample.in_line.values()) * self._sequences / sample.sequences
            for other, sample in self._samples.items()
            if other.does_no_more_than(kind)
            and (other.tp, other.cp, other.ep) == tuple(map(min, other[:3], kind[:3]))
        )
        return _TIME * max(seconds, default=0.0)

    def _of_weights(self, degrees: Degrees) -> tuple[float, float]:
        """Return the seconds of FSDP's collectives and of its copies in a batch, without a pipeline."""
        scaled = [
            (sample.time, max(kind.tp, kind.ep) / weight_shards(degrees))
            for kind, sample in self._samples.items()
        ]
        traffic = min((time.fsdp * scale for time, scale in scaled), default=0.0)
        return traffic, min((time.parts.get(COPIES, 0.0) * scale for time, scale in scaled), default=0.0)

    def _largest_batch(self, degrees: Degrees, kind: Kind, pipeline: PipelineShape | None) -> float:
        """Return the sequences that fit the memory at most at a time, if each tensor is split as often as possible."""
        # Only the last stage of a pipeline computes the loss, and there few micro batches are kept.
        of_sequence = max(
            (
                (sample.of_sequence if pipeline is None else sample.activations)
                * (other.tp * other.cp / (kind.tp * kind.cp))
                for other, sample in self._samples.items()
                if other.mode == kind.mode and other.tp <= kind.tp and other.cp <= kind.cp
            ),
            default=0.0,
        )
        constant = min(
            (sample.memory_of_weights(degrees, pipeline) for sample in self._samples.values()), default=0.0
        )
        left = self._gpu.usable - constant
        if left <= 0:
            return 0.0
        return left / (_MEMORY * of_sequence) if of_sequence else math.inf
