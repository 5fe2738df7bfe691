"""`forecast_memory`: the peak memory of a rank in a step of a job, by part, and what the allocator makes of it."""

from collections import Counter
from dataclasses import dataclass

from transformers import PretrainedConfig

from titanplans import modeling
from titanplans.config import JobConfig, strategy_of
from titanplans.foresight.allocator import Reserved, replay
from titanplans.foresight.depth import Depth, Expanded, expand, kinds_of
from titanplans.foresight.pipeline import Crossing
from titanplans.foresight.rehearsal import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, Rehearsal, rehearse
from titanplans.observe.storages import Allocation, Segment
from titanplans.parallel.activation_checkpoint import check_activation_checkpointing
from titanplans.split.decoder import find_decoder
from titanplans.training.job import resolve
from titanplans.training.pipeline.stage import starts_of_stages
from titanplans.training.trainer import documents

GATHERED, COMMUNICATION = "gathered parameters", "FSDP's buffers"
LOSS, ACTIVATIONS, BACKWARD, UPDATE = (
    "logits and loss",
    "activations",
    "backward of a block",
    "temporaries of the update",
)
PARTS = {
    WEIGHTS: "shards of the parameters, in training.dtype",
    GRADIENTS: "shards of the gradients",
    OPTIMIZER: "moments",
    BUFFERS: "the model's buffers",
    GATHERED: "parameters of the FSDP modules that are gathered at the same time",
    COMMUNICATION: "inputs and outputs of its collectives, and gradients that wait for their reduction",
    ACTIVATIONS: "tensors of the forward that are kept for the backward",
    LOSS: "logits, their gradient and the loss's temporaries",
    BACKWARD: "gradients of activations and of full parameters, and recomputed activations",
    UPDATE: "of clipping and of the optimizer",
}
"""What the memory at the peak is for."""


@dataclass
class MemoryForecast:
    """The memory of a rank, in bytes."""

    stage: int
    """Index of the pipeline rank; 0 without a pipeline."""
    parts: dict[str, int]
    """What is allocated at the peak, by part (see PARTS)."""
    live: int
    """The peak of the bytes that tensors have at the same time: the sum of `parts`."""
    when: Segment
    """When in the step the peak is."""
    standard: Reserved
    """What the allocator reserves with its default settings."""
    expandable: Reserved
    """What it reserves with expandable segments."""
    standard_on_gpu: Reserved
    """As `standard`, on a GPU whose memory is limited."""
    expandable_on_gpu: Reserved
    """As `expandable`, on a GPU whose memory is limited."""
    timeline: list[tuple[Segment, int]]
    """The peak of each segment of the second step, in order."""

    @property
    def when_text(self) -> str:
        """When in the step the peak is, in words."""
        segment = self.when
        batch = f" of batch {segment.batch}" if segment.batch else ""
        return (
            _WHEN.get(segment.kind, segment.kind)
            + ("" if segment.block is None else f" of block {segment.block}")
            + batch
        )


class BlocksDiffer(Exception):
    """Blocks that should be alike allocate different tensors."""


def forecast_memory(job: JobConfig, world_size: int, capacity: int | None = None) -> list[MemoryForecast]:
    """Rehearse `job` and return the peak memory of a rank: with a pipeline of the first, a middle and the last stage.

    Args:
        job: a job whose options don't contradict each other.
        world_size: the number of ranks.
        capacity: bytes that torch's allocator has on the GPU; None: no limit.

    Raises:
        UserError: the job's model can't be parallelised as the job says, or can't be rehearsed (see `rehearse`).
    """
    config = resolve.hf_config(job)
    try:
        return _forecast(*shortened(job, config), config, world_size, capacity)
    except BlocksDiffer:
        return _forecast(*shortened(job, config, every_block=True), config, world_size, capacity)


def _forecast(
    job: JobConfig, depth: Depth, config: PretrainedConfig, world_size: int, capacity: int | None
) -> list[MemoryForecast]:
    crossing, stages = Crossing(), job.parallelism.pipeline_parallel_degree
    ranks = {stage: stage * world_size // stages for stage in sorted({0, stages // 2, stages - 1})}
    return [
        forecast_of(rehearse(job, config, world_size, rank, depth.removed, crossing), depth, stage, capacity)
        for stage, rank in ranks.items()
    ]


def shortened(
    job: JobConfig, config: PretrainedConfig, *, every_block: bool = False
) -> tuple[JobConfig, Depth]:
    """Return a job that splits the rehearsed blocks into stages as `job` splits all blocks, and which blocks these are.

    `every_block`: let no block stand for others.
    """
    model, p = modeling.build(config), job.parallelism
    decoder, stages = find_decoder(model), p.pipeline_parallel_degree
    recomputed = check_activation_checkpointing(model, strategy_of(job).activation_checkpoint)
    kinds = kinds_of(decoder, recomputed)
    lists = {name.rpartition(".")[0] for name in decoder.names}
    if every_block or len(lists) > 1:  # YOCO has two lists
        kinds = list(range(len(kinds)))
    if stages == 1:
        return job, Depth(kinds)
    starts = starts_of_stages(model, p, stages, job.training.seq_len)
    if len(starts) > stages:
        # A schedule with several stages a rank gathers the parameters of all blocks of a stage at once, and some schedules
        # compute the gradients of weights so. Then no block stands for others.
        kinds = list(range(len(kinds)))
    depth = Depth(kinds, starts)
    # Without the removed blocks the others are numbered without gaps.
    split_points = tuple(decoder.names[start] for start in depth.starts[1:])
    options = {"pipeline_parallel_split_points": split_points, "pipeline_parallel_layers_per_stage": None}
    return job.model_copy(update={"parallelism": p.replace(**options)}), depth


def forecast_of(
    rehearsal: Rehearsal, depth: Depth, stage: int = 0, capacity: int | None = None
) -> MemoryForecast:
    """Return the memory of a rehearsed rank; `capacity` as in `forecast_memory`.

    Raises:
        BlocksDiffer: a block allocates other tensors than one that it stands for.
    """
    expanded = expand(rehearsal, depth)
    if expanded.missing or expanded.leaked or expanded.differing is not None:
        raise BlocksDiffer(expanded.missing, expanded.leaked, expanded.differing)
    parts = [part_of(allocation) for allocation in rehearsal.record.allocations]
    at_peak, when, timeline = _peak(expanded, parts)
    return MemoryForecast(
        stage=stage,
        parts={part: at_peak[part] for part in PARTS if at_peak[part]},
        live=sum(at_peak.values()),
        when=when,
        standard=replay(expanded.events),
        expandable=replay(expanded.events, expandable=True),
        standard_on_gpu=replay(expanded.events, capacity=capacity),
        expandable_on_gpu=replay(expanded.events, expandable=True, capacity=capacity),
        timeline=timeline,
    )


def assumptions(job: JobConfig) -> list[str]:
    """Return what a forecast of `job` assumes, in words."""
    notes = []
    if job.compile.enable:
        notes.append("compile: not modelled; these are the numbers without it, and compiled blocks need less")
    if job.parallelism.enable_async_tensor_parallel or job.parallelism.enable_fsdp_symm_mem:
        notes.append(
            "symmetric memory (async tensor parallelism, FSDP): not modelled; its buffers come on top"
        )
    if job.parallelism.expert_parallel_degree > 1:
        notes.append("experts: tokens are assumed to be routed evenly")
    if documents.document_keyword(job, resolve.hf_config(job)) is not None:
        notes.append("documents: estimated as if joined, without the masks that keep them apart")
    return notes


_WHEN = {
    "begin": "the beginning of the step",
    "forward": "the forward",
    "loss": "the loss",
    "backward": "the backward",
    "clip": "the clipping of gradients",
    "update": "the optimizer's update",
    "end": "the end of the step",
    "schedule": "the pipeline's schedule, between two computations",
    "backward_input": "the backward of inputs",
    "backward_weight": "the backward of weights",
}


def part_of(allocation: Allocation) -> str:
    """Return what an allocation is for: a key of PARTS."""
    if allocation.part is not None:
        return allocation.part
    if allocation.is_fsdp:
        return GATHERED if allocation.is_resized else COMMUNICATION
    if allocation.phase == "update":
        return UPDATE
    if allocation.segment.kind == "loss":
        return LOSS
    return ACTIVATIONS if allocation.phase == "forward" else BACKWARD


def _peak(expanded: Expanded, parts: list[str]) -> tuple[Counter[str], Segment, list[tuple[Segment, int]]]:
    """Return what is allocated at the peak by part, its segment, and the peak of each segment of the last step."""
    now, at_peak, when = Counter[str](), Counter[str](), expanded.segments[0]
    live = peak = 0
    timeline: list[tuple[Segment, int]] = []
    last_step = expanded.segments[-1].step
    for event, segment in zip(expanded.events, expanded.segments, strict=True):
        now[parts[expanded.sources[event.block]]] += event.size
        live += event.size
        # Of equal peaks the later one: in the first step the optimizer has no states before the update.
        if live > peak or (live == peak and segment.step > when.step):
            peak, at_peak, when = live, now.copy(), segment
        if segment.step == last_step:
            if not timeline or timeline[-1][0] != segment:
                timeline.append((segment, live))
            elif live > timeline[-1][1]:
                timeline[-1] = segment, live
    return at_peak, when, timeline
