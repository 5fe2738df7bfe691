"""`Bounds`: times that a step of a layout does not fall below, from samples of other layouts."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from titanplans.foresight.hardware import Gpu
from titanplans.foresight.layouts import MODES
from titanplans.foresight.predict import LayoutSample, PipelineShape, batches_of, weight_shards
from titanplans.foresight.time import ATTENTION, KERNELS, OTHERS, PRODUCTS, bandwidth_of
from titanplans.plan.degrees import Degrees

_TIME = 0.99
"""A bound counts as this part of itself, because products of smaller tensors take other times."""
_MEMORY = 0.8
"""The same for the memory of a sequence, which other layouts may split into fewer bytes."""


class Kind(NamedTuple):
    """What a sample has in common with the layouts that follow from it."""

    tp: int
    cp: int
    ep: int
    mode: str
    """What is recomputed: activation_checkpoint.mode."""


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
            self._in_line("tp", kind) + self._in_line("cp", kind), self._in_line_of_smaller_degrees(kind)
        )
        seconds = self._arithmetic(kind) + in_line
        host = min((sample.time.host for sample in self._samples.values()), default=0.0)
        if pipeline is None:
            fewest = math.ceil(batches[-1] / largest)
            return max(seconds, max(self._traffic(degrees), _TIME * host) * fewest)
        micro_batches = batches[-1] // pipeline.micro_batch
        seconds *= 1 + (pipeline.bubble(micro_batches) or 0.0) / micro_batches
        sums = min(
            (sample.sums_of_gradients(degrees, pipeline) for sample in self._samples.values()), default=0
        )
        ranks = degrees.dp_replicate * degrees.dp_shard
        steps = self._sequences // (ranks * batches[-1])
        of_host = _TIME * host / degrees.pp * micro_batches * steps
        return max(seconds + sums * steps * (micro_batches - 1), of_host)

    def _arithmetic(self, kind: Kind) -> float:
        """Return the seconds without waits and collectives, which are the same in all layouts that recompute the same."""
        least: dict[str, float] = {}
        for other, sample in self._samples.items():
            parts = sample.time.parts
            seconds = sum(parts.get(part, 0.0) for part in (PRODUCTS, ATTENTION, KERNELS, OTHERS))
            seconds *= self._sequences / sample.sequences
            least[other.mode] = min(least.get(other.mode, math.inf), seconds)
        known = (seconds for mode, seconds in least.items() if MODES.index(mode) <= MODES.index(kind.mode))
        return _TIME * max(known, default=0.0)

    def _in_line(self, axis: str, kind: Kind) -> float:
        """Return the seconds of the collectives of tensor or context parallelism, by the smallest degree in a sample."""
        of_axis = [
            (getattr(other, axis), sample)
            for other, sample in self._samples.items()
            if other.tp * other.cp == getattr(other, axis) > 1 == other.ep
        ]
        if not of_axis:
            return 0.0
        smallest, sample = min(of_axis, key=lambda item: item[0])
        degree, apart = getattr(kind, axis), kind.tp if axis == "cp" else 1
        bandwidth = bandwidth_of(range(0, degree * apart, apart), self._gpu)
        slower = max(1.0, bandwidth_of(range(smallest), self._gpu) / bandwidth)
        # A rank has `degree` times as many sequences, and receives (degree - 1) / degree of their tokens. In an all-to-all
        # it exchanges only its own tokens, which are as many in all layouts.
        of_all = (degree - 1) / (smallest - 1)
        of_own = of_all * smallest / degree
        seconds = sum(
            seconds * (of_own if part.startswith("all-to-all") else of_all)
            for part, seconds in sample.in_line.items()
        )
        return _TIME * slower * seconds * self._sequences / sample.sequences

    def _in_line_of_smaller_degrees(self, kind: Kind) -> float:
        """Return the most seconds of collectives in samples of which no degree is larger: higher degrees take no less."""
        seconds = (
            sum(sample.in_line.values()) * self._sequences / sample.sequences
            for other, sample in self._samples.items()
            if other.tp <= kind.tp and other.cp <= kind.cp and other.ep <= kind.ep
        )
        return _TIME * max(seconds, default=0.0)

    def _traffic(self, degrees: Degrees) -> float:
        """Return the seconds of FSDP's collectives in a batch, without a pipeline."""
        seconds = (
            sample.time.fsdp * max(kind.tp, kind.ep) / weight_shards(degrees)
            for kind, sample in self._samples.items()
        )
        return min(seconds, default=0.0)

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
