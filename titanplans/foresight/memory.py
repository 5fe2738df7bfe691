"""`memory_of`: the peak memory of a rank in a step of a job, by part, and what the allocator reserves for it."""

from collections import Counter
from dataclasses import dataclass

from titanplans.foresight.allocator import Reserved, replay
from titanplans.foresight.depth import Depth, Expanded, expand
from titanplans.foresight.rehearsal import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, Rehearsal
from titanplans.observe.storages import Allocation, Segment

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


def memory_of(rehearsal: Rehearsal, depth: Depth, capacity: int | None = None) -> MemoryForecast:
    """Return the memory of a rehearsed rank.

    `capacity` is the number of bytes that torch's allocator has on the GPU; None: no limit.

    Raises:
        BlocksDiffer: a block allocates other tensors than a block that it stands for.
    """
    expanded = _expand(rehearsal, depth)
    at_peak, when, timeline = _peak(expanded, rehearsal)
    standard, expandable = replay(expanded.events), replay(expanded.events, expandable=True)

    def on_gpu(unlimited: Reserved, *, expandable: bool) -> Reserved:
        if capacity is None or unlimited.reserved <= capacity:
            return unlimited
        return replay(expanded.events, expandable=expandable, capacity=capacity)

    return MemoryForecast(
        parts=at_peak,
        live=sum(at_peak.values()),
        when=when,
        standard=standard,
        expandable=expandable,
        standard_on_gpu=on_gpu(standard, expandable=False),
        expandable_on_gpu=on_gpu(expandable, expandable=True),
        timeline=timeline,
    )


def parts_at_peak(rehearsal: Rehearsal, depth: Depth) -> dict[str, int]:
    """Return what is allocated at the peak by part. Errors as `memory_of`."""
    parts, _, _ = _peak(_expand(rehearsal, depth), rehearsal)
    return parts


def _expand(rehearsal: Rehearsal, depth: Depth) -> Expanded:
    expanded = expand(rehearsal, depth)
    if expanded.missing or expanded.leaked or expanded.differing is not None:
        raise BlocksDiffer(expanded.missing, expanded.leaked, expanded.differing)
    return expanded


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


def _peak(
    expanded: Expanded, rehearsal: Rehearsal
) -> tuple[dict[str, int], Segment, list[tuple[Segment, int]]]:
    """Return what is allocated at the peak by part, its segment, and the peak of each segment of the last step."""
    parts = [part_of(allocation) for allocation in rehearsal.record.allocations]
    now, at_peak, when = Counter[str](), Counter[str](), expanded.segments[0]
    live = peak = 0
    timeline: list[tuple[Segment, int]] = []
    last_step = expanded.segments[-1].step
    for event, segment in zip(expanded.events, expanded.segments, strict=True):
        now[parts[expanded.sources[event.block]]] += event.size
        live += event.size
        # Of equal peaks take the one in the later step: in the first step the optimizer has no states before the update.
        if live > peak or (live == peak and segment.step > when.step):
            peak, at_peak, when = live, now.copy(), segment
        if segment.step == last_step:
            if not timeline or timeline[-1][0] != segment:
                timeline.append((segment, live))
            elif live > timeline[-1][1]:
                timeline[-1] = segment, live
    return {part: at_peak[part] for part in PARTS if at_peak[part]}, when, timeline
