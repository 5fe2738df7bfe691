"""`LayoutSample`: the forecast of one sequence without a pipeline, from which many layouts are predicted approximately.

These layouts have the sample's degrees of tensor, context and expert parallelism and its recomputation, and any batch and
any number of pipeline stages.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from titanplans.config import JobConfig
from titanplans.errors import UserError
from titanplans.foresight.hardware import Gpu
from titanplans.foresight.layouts import JobLayout, divisors
from titanplans.foresight.memory import ACTIVATIONS, COMMUNICATION, GATHERED
from titanplans.foresight.rehearsal import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS
from titanplans.foresight.time import (
    COPIES,
    FOR_FSDP,
    FOR_HOST,
    PARTS,
    UPDATE,
    TimeForecast,
    seconds_of_bytes,
)
from titanplans.parallel.pipeline.timeline import UNITS, timeline
from titanplans.plan.degrees import Degrees
from titanplans.split.stages.schedules import orders, stages_of_ranks

_CONSTANT = (WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS, GATHERED, COMMUNICATION)
"""The parts of the memory that do not depend on the batch."""
_RESERVED = 1.1
"""Bytes that the allocator reserves per byte of a batch's tensors. It only decides which layouts are tried."""
_MICRO_BATCHES = 4
"""In a pipeline, at most this number of micro batches per stage is tried: with more, the idle time is hardly shorter."""


class PipelineShape:
    """The stages of a job's pipeline.

    Args:
        job: the job. Its degrees are not used.
        ranks: the pipeline-parallel degree.
        starts: the index of the first block of each stage.

    Attributes:
        micro_batch: the sequences of a micro batch.
        unsharded: what a stage holds unsharded, in bytes per byte of its weights: gathered parameters and sums of gradients.
        summed: the bytes, per byte of its weights, that it reads and writes to add the gradients of a micro batch.

    Raises:
        ParallelError: the schedule does not take that many stages.
    """

    def __init__(self, job: JobConfig, ranks: int, starts: Sequence[int]):
        p, t = job.parallelism, job.training
        self._schedule, self._ranks, self._starts = p.pipeline_parallel_schedule, ranks, starts
        self._stages_of_ranks = stages_of_ranks(self._schedule, ranks, len(starts))
        self._bubbles: dict[int, float | None] = {}
        self.micro_batch = p.pipeline_parallel_microbatch_size
        # FSDP2 computes in the dtype of the weights, and reduces in the dtype of the computation, by default.
        parameter_dtype = t.mixed_precision_param or t.dtype
        weight, parameter, total = (
            getattr(torch, dtype).itemsize
            for dtype in (t.dtype, parameter_dtype, t.mixed_precision_reduce or parameter_dtype)
        )
        gathered = 0 if p.fsdp_reshard_after_forward == "always" else parameter
        self.unsharded, self.summed = (gathered + total) / weight, (parameter + 2 * total) / weight

    def bubble(self, micro_batches: int) -> float | None:
        """Return the idle time in a batch, in units of a micro batch's time; None: the schedule refuses `micro_batches`."""
        if micro_batches not in self._bubbles:
            stages = len(self._starts)
            try:
                order = orders(self._schedule, self._ranks, stages, micro_batches)
            except UserError:
                self._bubbles[micro_batches] = None
            else:
                unit = (UNITS["forward"] + UNITS["backward"]) * stages / self._ranks
                self._bubbles[micro_batches] = timeline(order).duration / unit - micro_batches
        return self._bubbles[micro_batches]

    def slowest(self, time: TimeForecast) -> float:
        """Return the seconds of a micro batch on the slowest rank, from a `time` without a pipeline."""
        blocks = [time.blocks[block] for block in sorted(time.blocks)]
        stages = [sum(blocks[begin:end]) for begin, end in pairwise([*self._starts, len(blocks)])]
        stages[0] += time.before
        stages[-1] += time.after
        return max(sum(stages[stage] for stage in of_rank) for of_rank in self._stages_of_ranks)


class LayoutSample(NamedTuple):
    """The memory and the time of a batch of one sequence a data-parallel rank, without a pipeline."""

    parts: dict[str, int]
    """The bytes that are allocated at the peak, by part (see `MemoryForecast`)."""
    time: TimeForecast
    sequences: int
    """The sequences of the step, over all ranks."""
    gpus: int
    gpu: Gpu

    @property
    def live(self) -> int:
        """The bytes that are allocated at the peak."""
        return sum(self.parts.values())

    @property
    def _constant(self) -> int:
        return sum(self.parts.get(part, 0) for part in _CONSTANT)

    @property
    def of_sequence(self) -> int:
        """The bytes that one more sequence needs."""
        return self.live - self._constant

    @property
    def activations(self) -> int:
        """The bytes that the blocks keep of a sequence for the backward."""
        return self.parts.get(ACTIVATIONS, 0)

    @property
    def in_line(self) -> dict[str, float]:
        """By operation and number of ranks, the seconds of the collectives that do not overlap with other work."""
        return {part: seconds for part, seconds in self.time.parts.items() if part not in PARTS}

    @property
    def seconds_of_sequence(self) -> float:
        """The seconds of those parts that grow with the sequences of a batch."""
        once = (FOR_FSDP, FOR_HOST, COPIES, UPDATE)
        return sum(seconds for part, seconds in self.time.parts.items() if part not in once)

    def seconds(self, layout: JobLayout, pipeline: PipelineShape | None) -> float:
        """Return the approximate seconds of a step."""
        time, batches = self.time, layout.batches
        parts, update = time.parts, time.parts.get(UPDATE, 0.0)
        if pipeline is None:
            busy = self.seconds_of_sequence
            waits = parts.get(FOR_FSDP, 0.0) + parts.get(FOR_HOST, 0.0)
            # More sequences hide more of the collectives.
            waits = max(0.0, waits - (layout.batch - 1) * busy)
            return batches * (layout.batch * busy + parts.get(COPIES, 0.0) + waits) + update
        micro_batches = layout.batch // pipeline.micro_batch
        bubble = pipeline.bubble(micro_batches)
        assert bubble is not None  # the batch is one of batches_of
        mean = self.seconds_of_sequence / layout.degrees.pp
        computed = pipeline.micro_batch * (micro_batches * pipeline.slowest(time) + bubble * mean)
        computed += (micro_batches - 1) * self.sums_of_gradients(layout.degrees, pipeline)
        # Parameters are gathered, and gradients reduced, once in a batch.
        return batches * (computed + parts.get(COPIES, 0.0) / layout.degrees.pp) + update

    def sums_of_gradients(self, degrees: Degrees, pipeline: PipelineShape) -> float:
        """Return the seconds that a stage takes to add the gradients of a micro batch to the sum over the earlier ones."""
        return seconds_of_bytes(self._of_stage(degrees) * pipeline.summed, self.gpu)

    def memory(self, batch: int) -> float:
        """Return approximately the bytes that are reserved with `batch` sequences, without a pipeline."""
        return self._constant + self.of_sequence * batch * _RESERVED

    def memory_of_weights(self, degrees: Degrees, pipeline: PipelineShape | None) -> float:
        """Return the bytes that weights, their gradients and the optimizer need at least, whatever the batch."""
        sharded = sum(self.parts.get(part, 0) for part in (WEIGHTS, OPTIMIZER))
        return sharded if pipeline is None else sharded + self._of_stage(degrees) * pipeline.unsharded

    def _of_stage(self, degrees: Degrees) -> float:
        """Return the bytes of the weights of a pipeline stage in training.dtype, without FSDP."""
        weights = self.parts.get(WEIGHTS, 0) * self.gpus
        return weights / degrees.dp_replicate / weight_shards(degrees)

    def memory_of_stage(self, degrees: Degrees, pipeline: PipelineShape) -> float:
        """Return approximately the bytes that the first stage of a pipeline allocates.

        It holds the activations of its own blocks for as many micro batches as there are stages. Together they are as large
        as those of one micro batch without a pipeline. `degrees` are the sample's, except for the pipeline.
        """
        return self.memory_of_weights(degrees, pipeline) + self.activations * pipeline.micro_batch


def weight_shards(degrees: Degrees) -> int:
    """Return the largest number of ranks over which a weight is split, without FSDP; experts only over pp x ep."""
    return degrees.pp * max(degrees.ep, degrees.tp)


def batches_of(degrees: Degrees, sequences: int, pipeline: PipelineShape | None) -> list[int]:
    """Return the batches of a rank, the smallest first, into which the `sequences` of a step can be divided.

    In a pipeline each batch has at least as many micro batches as there are stages, and not many more.
    """
    batches = divisors(sequences // (degrees.dp_replicate * degrees.dp_shard))
    if pipeline is None:
        return batches
    fewest = degrees.pp * pipeline.micro_batch
    return [
        each
        for each in batches
        if fewest <= each <= _MICRO_BATCHES * fewest
        and each % pipeline.micro_batch == 0
        and pipeline.bubble(each // pipeline.micro_batch) is not None
    ]
