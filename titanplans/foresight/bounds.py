"""`Bounds`: lower bounds on the time of a step of a layout, computed from samples of other layouts."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from titanplans.foresight.hardware import Gpu
from titanplans.foresight.layouts import MODES
from titanplans.foresight.predict import LayoutSample, PipelineShape, batches_of, weight_shards
from titanplans.foresight.time import ATTENTION, COPIES, KERNELS, OTHERS, PRODUCTS, seconds_of_byte
from titanplans.plan.degrees import Degrees

_TIME = 0.99
"""Bounds are multiplied by this factor, because other degrees have other latencies."""
_ARITHMETIC = 0.95
"""The factor for bounds on arithmetic, because the time of a product is not proportional to its tokens."""
_MEMORY = 0.8
"""The factor for the memory of a sequence, because it may need fewer bytes in other layouts."""


class Kind(NamedTuple):
    """What a sample has in common with the layouts that are predicted from it."""

    tp: int
    cp: int
    ep: int
    mode: str
    """What is recomputed: activation_checkpoint.mode."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of "tp", "cp" and "ep" whose degree is above 1."""
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
        """Return a lower bound on the seconds of a step with these degrees; infinite if no batch fits the memory."""
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
        """Whether there is a sample that shards by this axis ("tp", "cp" or "ep") alone."""
        return any(kind.axes == (axis,) for kind in self._samples)

    def _arithmetic(self, kind: Kind) -> float:
        """Return a bound on the seconds of computation, from the samples that do no more than `kind`.

        Layouts with the same axes and the same recomputation take nearly the same time, and another axis adds operators.
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
        """Bound the seconds of an axis' collectives, from the sample of this axis alone with the least degree."""
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
            # all-to-all it exchanges only its own tokens, whose number is the same in all layouts.
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
        """Return the largest time of collectives in samples with no larger degree; higher degrees take no less."""
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
        """Return an upper bound on the sequences that fit the memory at once, as if tp and cp split every tensor."""
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
