"""`time_of`: the time of a step on a rank, by part, from the work of its operators and the data of a GPU.

The operators are taken in the order in which the host issues them, with three clocks: of the host, of the default stream,
and of FSDP2's streams, which overlap with the rest. A part is what the default stream does or waits for, so the parts add
up to the step.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from titanplans.foresight.depth import Depth, owners_of, unrolled
from titanplans.foresight.hardware import Gpu
from titanplans.foresight.rehearsal import BATCHES, STEPS, WEIGHTS, Rehearsal
from titanplans.observe.operators import Collective
from titanplans.observe.storages import Operation, Segment
from titanplans.observe.work import Work
from titanplans.split.stages.schedules import Action

PRODUCTS, ATTENTION, OTHERS, KERNELS, COPIES, UPDATE = (
    "matrix products",
    "attention",
    "other operators",
    "Triton kernels",
    "FSDP's copies",
    "clipping and update",
)
FOR_FSDP, FOR_HOST, IDLE = "waiting for FSDP", "waiting for the host", "waiting for other stages"
PARTS = {
    PRODUCTS: "bound by the GPU's arithmetic",
    ATTENTION: "fused attention",
    OTHERS: "bound by the GPU's memory",
    KERNELS: "such as flash-linear-attention's; counted by the bytes of their tensors, so they may take longer",
    COPIES: "of gathered parameters and of gradients",
    FOR_FSDP: "for parameters that are not gathered yet, and gradients that are not reduced yet",
    FOR_HOST: "for Python to issue the next operator",
    UPDATE: "of gradients and parameters",
    IDLE: "of the pipeline",
}
"""What the default stream does. The collectives that do not overlap are parts, too, by operation and group."""
_UPDATE = ("clip", "update")
_MEMORY = 0.85
"""The fraction of the data sheet's memory bandwidth that copies reach."""
_LINK = 0.8
"""The fraction of the data sheet's link bandwidth that NCCL reaches: an all-reduce on 8 A100 moves 227 of 300 GB/s."""
_HOP = 4e-6
"""Seconds of a step of NCCL's rings; a collective of n ranks takes n - 1 steps, and an all-reduce twice as many."""


@dataclass
class TimeForecast:
    """The time of a step on a rank, in seconds."""

    parts: dict[str, float]
    """What the default stream does or waits for; the keys are those of PARTS, and collectives."""
    fsdp: float
    """The time of FSDP's collectives, most of which overlaps with other work."""
    actions: dict[Action, float]
    """With a pipeline, the duration of each computation of the schedule."""
    blocks: dict[int, float]
    """The seconds of the operators of each block of the job's model in a step, by the block's index."""
    before: float
    """The seconds of the operators before the blocks."""
    after: float
    """The seconds of the operators after the blocks, the loss among them."""
    host: float
    """The seconds in which Python issues all operators."""

    @property
    def seconds(self) -> float:
        """The time of the step, if the rank does not wait for other pipeline stages."""
        return sum(self.parts.values())


def time_of(rehearsal: Rehearsal, depth: Depth, gpu: Gpu, batches: int = 1) -> TimeForecast:
    """Return the time of a step of the full job on `gpu`, from the rehearsal of a part of its blocks.

    `batches` is the number of batches whose gradients a step accumulates.
    """
    clocks, rehearsed = _Clocks(gpu), min(batches, BATCHES)
    update = _scale_of_update(rehearsal, depth)
    for segment, operation in _operations(rehearsal, depth):
        if segment.kind in _UPDATE:
            # The norm of all gradients is one number.
            scale = update if operation.work.collective is None else 1
        else:
            scale = scale_of_batch(segment, batches)
        clocks.run(operation, segment, scale)
    actions = {action: seconds / rehearsed for action, seconds in clocks.actions.items()}
    blocks: dict[int, float] = defaultdict(float)
    before = after = 0.0
    for (kind, place), seconds in clocks.operators.items():
        if place is not None:
            blocks[place] += seconds
        elif kind == "loss":
            after += seconds
        elif kind not in _UPDATE:
            before += seconds
    return TimeForecast(
        dict(clocks.parts), clocks.fsdp_seconds, actions, dict(blocks), before, after, clocks.host
    )


def scale_of_batch(segment: Segment, batches: int) -> float:
    """Return how often an operator of a rehearsed batch runs in a step that accumulates the gradients of `batches`."""
    rehearsed = min(batches, BATCHES)
    if segment.action is not None:
        return batches / rehearsed
    # One batch between the first and the last is rehearsed, and stands for all of them.
    return batches - rehearsed + 1 if segment.batch == 1 else 1


def _operations(rehearsal: Rehearsal, depth: Depth) -> Iterator[tuple[Segment, Operation]]:
    """Yield the operations of the last step of the job's model, in order, with segments of its blocks."""
    operations = [each for each in rehearsal.record.operations if each.segment.step == STEPS]
    for segment, run, copy in unrolled(operations, depth):
        place = None if segment.block is None else depth.place(segment.block, copy)
        here = replace(segment, block=place)
        for operation in run:
            # Some operators of a block run outside of it: a schedule may gather the parameters of all blocks at once.
            block = rehearsal.block_of(operation.module) if segment.block is None else None
            for _ in range(depth.copies(block)):
                yield here, operation


def _scale_of_update(rehearsal: Rehearsal, depth: Depth) -> float:
    """Return the size of the parameters of the job's model, divided by the size of the rehearsed ones."""
    rehearsed = whole = 0
    owners = owners_of(rehearsal)
    for index, allocation in enumerate(rehearsal.record.allocations):
        if allocation.part == WEIGHTS:
            rehearsed += allocation.size
            whole += allocation.size * depth.copies(owners.get(index))
    return whole / rehearsed if rehearsed else 1.0


@dataclass
class _Clocks:
    """When the host, the default stream and FSDP2's streams have done what they were given, in seconds."""

    gpu: Gpu
    host: float = 0.0
    default: float = 0.0
    fsdp: float = 0.0
    gathers: list[float] = field(default_factory=list)
    """When the gathers end whose parameters have not been copied out yet."""
    copied_out: float = 0.0
    """When the default stream has last copied out gathered parameters."""
    reduced: float = 0.0
    """When the newest reduction ends."""
    fsdp_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    actions: dict[Action, float] = field(default_factory=lambda: defaultdict(float))
    operators: dict[tuple[str, int | None], float] = field(default_factory=lambda: defaultdict(float))
    """By kind of segment and block, what the default stream computes, without waits and FSDP's copies."""

    def run(self, operation: Operation, segment: Segment, scale: float) -> None:
        """Issue an operation, which stands for `scale` operations of its kind."""
        work, before = operation.work, self.default
        self.host += self.gpu.host_us * 1e-6
        seconds = seconds_of(work, self.gpu)
        if operation.is_fsdp and (operation.stream or work.collective is not None):
            self._run_fsdp(work.collective, seconds, scale)
        else:
            self._wait(self.host, FOR_HOST, scale)
            is_copy_out = operation.is_fsdp and "split_with_sizes_copy" in work.operator
            if is_copy_out and self.gathers:
                self._wait(self.gathers.pop(0), FOR_FSDP, scale)
            if segment.kind in _UPDATE:
                self._wait(self.fsdp, FOR_FSDP, 1)
            self.default += seconds
            if segment.kind in _UPDATE:
                part = UPDATE
            elif operation.is_fsdp:
                part = COPIES
                if is_copy_out:
                    self.copied_out = self.default
            else:
                part = part_of(work)
                self.operators[segment.kind, segment.block] += seconds * scale
            self.parts[part] += seconds * scale
        if isinstance(segment.action, Action):
            self.actions[segment.action] += self.default - before

    def _run_fsdp(self, collective: Collective | None, seconds: float, scale: float) -> None:
        start = max(self.fsdp, self.host)
        is_gather = collective is not None and collective.operation == "all_gather"
        if is_gather:
            # FSDP2 gathers into memory that the last copy-out has read.
            start = max(start, self.copied_out)
        elif collective is not None:
            # A reduction waits for its gradients, and for the one before it, since FSDP2 keeps the memory of one at a time.
            self._wait(self.reduced, FOR_FSDP, scale)
            start = max(start, self.default)
        self.fsdp = start + seconds
        self.fsdp_seconds += seconds * scale
        if is_gather:
            self.gathers.append(self.fsdp)
        elif collective is not None:
            self.reduced = self.fsdp

    def _wait(self, until: float, part: str, scale: float) -> None:
        if until > self.default:
            self.parts[part] += (until - self.default) * scale
            self.default = until


def part_of(work: Work) -> str:
    """Return the part of the step's time that an operator of the default stream belongs to."""
    if (collective := work.collective) is not None:
        return f"{collective.operation.replace('_', '-')} over {collective.ranks} GPUs"
    if work.is_attention:
        return ATTENTION
    return KERNELS if work.is_triton else PRODUCTS if work.flops else OTHERS


def seconds_of(work: Work, gpu: Gpu) -> float:
    """Return the time of an operator on `gpu`.

    A product or attention takes the longer of two times: of its arithmetic at the efficiency of hardware.toml, and of its
    bytes (Williams et al. 2009, "Roofline"). Every other operator takes the time of its bytes. A collective takes the time
    of the bytes that a rank receives, on a ring or, in an all-to-all, directly from each rank, and a latency for each other
    rank (an all-reduce two).
    """
    if (collective := work.collective) is not None:
        hops = (collective.ranks - 1) * (2 if collective.operation == "all_reduce" else 1)
        return hops * _HOP + (collective.received or 0) * seconds_of_byte(
            collective.operation, collective.group, gpu
        )
    seconds = seconds_of_bytes(work.bytes, gpu)
    if not work.flops:
        return seconds
    efficiency = gpu.attention_efficiency if work.is_attention else gpu.product_efficiency
    return max(seconds, work.flops / (gpu.peak(work.dtype or torch.float32) * efficiency))


def seconds_of_bytes(count: float, gpu: Gpu) -> float:
    """Return the time in which `gpu` reads or writes that many bytes of its memory."""
    return count / (gpu.memory_gb_s * 1e9 * _MEMORY)


def seconds_of_byte(operation: str, group: Sequence[int], gpu: Gpu) -> float:
    """Return the seconds in which a rank of `group` receives a byte, at the bandwidths of the data sheets.

    On a ring, a node receives through the network adapters of all its ranks together. In an all-to-all, a rank receives the
    bytes of other nodes through its own adapter, and at the same time the bytes of its node through the node's links.

    Args:
        operation: the collective, such as "all_to_all".
        group: the global ranks of the group; `gpus_per_node` consecutive ranks are a node.
        gpu: the GPUs.
    """
    nodes = Counter(rank // gpu.gpus_per_node for rank in group)
    of_node = max(nodes.values())
    if len(nodes) == 1:
        seconds = 1 / gpu.link_gb_s
    elif operation == "all_to_all":
        others = len(group) - 1
        far = (len(group) - of_node) / others
        seconds = max((of_node - 1) / others / gpu.link_gb_s, far / gpu.network_gb_s)
    else:
        seconds = 1 / min(gpu.link_gb_s, gpu.network_gb_s * of_node)
    return seconds / (1e9 * _LINK)
