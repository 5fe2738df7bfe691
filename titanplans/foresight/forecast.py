"""`forecast`: the memory and the time of a step of a job on GPUs, before there are GPUs. Start here."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeVar

from transformers import PretrainedConfig, PreTrainedModel

from titanplans import modeling
from titanplans.config import JobConfig, strategy_of
from titanplans.errors import ParallelError
from titanplans.foresight.compiled import NotTraced, is_modelled
from titanplans.foresight.depth import Depth, kinds_of
from titanplans.foresight.hardware import Gpu
from titanplans.foresight.memory import BlocksDiffer, MemoryForecast, memory_of, parts_at_peak
from titanplans.foresight.pipeline import Crossing
from titanplans.foresight.predict import LayoutSample
from titanplans.foresight.rehearsal import Observer, refuse_options, rehearse
from titanplans.foresight.repeat import PartsDiffer
from titanplans.foresight.time import TimeForecast, time_of
from titanplans.parallel.activation_checkpoint import check_activation_checkpointing
from titanplans.parallel.pipeline.timeline import timeline
from titanplans.split.decoder import find_decoder
from titanplans.split.stages.schedules import Kind, orders
from titanplans.text import class_name, show
from titanplans.training.job import resolve
from titanplans.training.pipeline.stage import starts_of_stages
from titanplans.training.trainer import documents

_WITHOUT_COMPILE = "these are the numbers without it"


@dataclass
class RankForecast:
    """A rank that was rehearsed."""

    stage: int
    """Index of the pipeline rank; 0 without a pipeline."""
    memory: MemoryForecast
    time: TimeForecast


@dataclass
class Forecast:
    """The memory and the time of a step."""

    ranks: list[RankForecast]
    """One rank; with a pipeline one of the first, of a middle and of the last stage."""
    seconds: float
    """The time of the step."""
    idle: float
    """The fraction of the ranks' time in which they wait for other pipeline stages; 0 without a pipeline."""
    sequences: int
    """The sequences of a step, over all ranks."""
    seq_len: int
    flops: int
    """Floating-point operations per token, as titanplans.modeling counts them for MFU."""
    gpus: int
    gpu: Gpu
    notes: list[str] = field(default_factory=list)
    """What could not be estimated as the job says, in words."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.sequences * self.seq_len / self.seconds / self.gpus

    @property
    def mfu(self) -> float:
        """The fraction of the GPU's peak in bfloat16 that the model's FLOPs take."""
        return self.flops * self.tokens_per_second / (self.gpu.bfloat16_tflops * 1e12)

    def reserved(self, expandable: bool) -> int:
        """Return the bytes that torch's allocator reserves on the fullest rank, with or without expandable segments."""
        memories = [rank.memory for rank in self.ranks]
        return max((each.expandable if expandable else each.standard).reserved for each in memories)

    def retries(self, expandable: bool) -> int | None:
        """Return how often the allocator returns unused memory to the GPU in two steps; None: it runs out of memory."""
        memories = [rank.memory for rank in self.ranks]
        on_gpu = [each.expandable_on_gpu if expandable else each.standard_on_gpu for each in memories]
        return None if any(each.is_out_of_memory for each in on_gpu) else max(each.retries for each in on_gpu)


Observe = Callable[[int, Depth], Observer]
"""Returns the observer of a rehearsal, given the index of the pipeline stage and which blocks are rehearsed."""


def forecast(job: JobConfig, world_size: int, gpu: Gpu, observe: Observe | None = None) -> Forecast:
    """Rehearse `job` on one rank, or with a pipeline on one rank of the first, of a middle and of the last stage.

    Args:
        job: a job whose options don't contradict each other.
        world_size: the number of ranks.
        gpu: the GPUs.
        observe: is called before each rehearsal. Some models are rehearsed twice, and then the second rehearsal counts.

    Raises:
        UserError: the job's model can't be parallelised as the job says, or can't be rehearsed (see `rehearse`).
    """
    config = resolve.hf_config(job)
    try:
        return forecast_of(job, config, world_size, gpu, observe=observe)
    except (BlocksDiffer, PartsDiffer):
        return forecast_of(job, config, world_size, gpu, every_block=True, observe=observe)


def forecast_of(
    job: JobConfig,
    config: PretrainedConfig,
    world_size: int,
    gpu: Gpu,
    *,
    every_block: bool = False,
    observe: Observe | None = None,
) -> Forecast:
    """Return the forecast of a job with a model of `config`.

    `every_block`: let no block, micro batch or chunk of the loss stand for others.

    Raises:
        BlocksDiffer: a block allocates other tensors than a block that it stands for.
        PartsDiffer: as in `rehearse`.
        UserError: as `forecast`.
    """
    refuse_options(job)
    result, notes = _without_compile_if_not_traced(
        job,
        lambda job: _forecast_of(job, config, world_size, gpu, every_block=every_block, observe=observe),
    )
    result.notes += notes
    return result


def sample(job: JobConfig, world_size: int, gpu: Gpu) -> LayoutSample:
    """Return the time and the memory of a batch of `job`, which has no pipeline.

    Cheaper than a forecast: one step is rehearsed, and no allocator replayed.

    Raises:
        UserError: as `forecast`.
    """
    config = resolve.hf_config(job)
    try:
        return sample_of(job, config, world_size, gpu)
    except BlocksDiffer:
        return sample_of(job, config, world_size, gpu, every_block=True)


def sample_of(
    job: JobConfig, config: PretrainedConfig, world_size: int, gpu: Gpu, *, every_block: bool = False
) -> LayoutSample:
    """Return the sample of a job with a model of `config`. Arguments and errors as `forecast_of`."""
    refuse_options(job)

    def run(job: JobConfig) -> LayoutSample:
        job, depth = shortened(job, config, every_block=every_block)
        rehearsal = rehearse(
            job, config, world_size, removed=depth.removed, repeats=not every_block, is_quick=True
        )
        sequences = resolve.global_batch_size(job, resolve.data_parallel_degree(job, world_size))
        return LayoutSample(
            parts_at_peak(rehearsal, depth), time_of(rehearsal, depth, gpu), sequences, world_size, gpu
        )

    result, _ = _without_compile_if_not_traced(job, run)
    return result


T = TypeVar("T")


def _without_compile_if_not_traced(job: JobConfig, run: Callable[[JobConfig], T]) -> tuple[T, list[str]]:
    """Return what `run` returns for `job`, or for the job without compile if its model can't be traced, and notes."""
    try:
        return run(job), []
    except NotTraced as error:
        if job.activation_checkpoint.mode == "memory_budget":
            raise ParallelError(
                f'activation_checkpoint.mode = "memory_budget" can\'t be estimated: compile is not modelled for this model '
                f"({error}), and without it nothing chooses the activations; take another mode"
            ) from error
        note = f"compile: not modelled for this model, because of {error}; {_WITHOUT_COMPILE}"
        return run(job.model_copy(update={"compile": job.compile.replace(enable=False)})), [note]


def _forecast_of(
    job: JobConfig,
    config: PretrainedConfig,
    world_size: int,
    gpu: Gpu,
    *,
    every_block: bool,
    observe: Observe | None,
) -> Forecast:
    p, crossing = job.parallelism, Crossing()
    short_job, depth = shortened(job, config, every_block=every_block)
    stages, data_parallel = p.pipeline_parallel_degree, resolve.data_parallel_degree(job, world_size)
    sequences = resolve.global_batch_size(job, data_parallel)
    batches = sequences // (job.training.local_batch_size * data_parallel)
    ranks = []
    for stage in sorted({0, stages // 2, stages - 1}):
        rank = stage * world_size // stages
        observer = None if observe is None else observe(stage, depth)
        rehearsal = rehearse(
            short_job,
            config,
            world_size,
            rank,
            depth.removed,
            crossing,
            observer,
            repeats=not every_block,
        )
        memory = memory_of(rehearsal, depth, gpu.usable)
        ranks.append(RankForecast(stage, memory, time_of(rehearsal, depth, gpu, batches)))
    seconds, idle = ranks[0].time.seconds, 0.0
    if stages > 1:
        seconds, idle = _with_pipeline(job, ranks, len(depth.starts), batches)
    seq_len = job.training.seq_len
    _, flops = modeling.count_flops(_unsplit(config), seq_len)
    return Forecast(ranks, seconds, idle, sequences, seq_len, flops, world_size, gpu)


_models: dict[str, PreTrainedModel] = {}


def _unsplit(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model of `config` on meta, not to be changed. The newest one is kept, since large ones take seconds."""
    key = f"{class_name(config)} {config.to_json_string(use_diff=False)}"
    if key not in _models:
        model = modeling.build(config)
        _models.clear()
        _models[key] = model
    return _models[key]


def _with_pipeline(
    job: JobConfig, ranks: list[RankForecast], stages: int, batches: int
) -> tuple[float, float]:
    """Return the seconds of a step, and the fraction of the ranks' time in which they wait for other stages."""
    p, samples = job.parallelism, defaultdict[tuple[Kind, int], list[float]](list)
    rehearsed = {action.stage for rank in ranks for action in rank.time.actions}
    inner = [stage for stage in sorted(rehearsed) if 0 < stage < stages - 1]
    for rank in ranks:
        for action, seconds in rank.time.actions.items():
            samples[action.kind, action.stage].append(seconds)

    def duration(kind: Kind, stage: int) -> float:
        alike = [stage] if stage in rehearsed else inner
        return fmean(seconds for each in alike for seconds in samples[kind, each])

    micro_batches = job.training.local_batch_size // p.pipeline_parallel_microbatch_size
    order = orders(p.pipeline_parallel_schedule, p.pipeline_parallel_degree, stages, micro_batches)
    computed = timeline(order, duration)
    outside = max(rank.time.seconds - batches * sum(rank.time.actions.values()) for rank in ranks)
    seconds = batches * computed.duration + outside
    return seconds, computed.idle_fraction * batches * computed.duration / seconds


def shortened(
    job: JobConfig, config: PretrainedConfig, *, every_block: bool = False
) -> tuple[JobConfig, Depth]:
    """Return a job that splits the rehearsed blocks into stages as `job` splits all blocks, and which blocks are rehearsed.

    `every_block`: let no block stand for others.
    """
    model, p = _unsplit(config), job.parallelism
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
        # A schedule with several stages per rank gathers the parameters of all blocks of a stage at once, and some schedules
        # also compute the weight gradients of all blocks at once. Then no block stands for others.
        kinds = list(range(len(kinds)))
    depth = Depth(kinds, starts)
    # Without the removed blocks the others are numbered without gaps.
    split_points = tuple(decoder.names[start] for start in depth.starts[1:])
    options = {"pipeline_parallel_split_points": split_points, "pipeline_parallel_layers_per_stage": None}
    return job.model_copy(update={"parallelism": p.replace(**options)}), depth


def assumptions(job: JobConfig) -> list[str]:
    """Return what a forecast of `job` assumes, in words."""
    notes = []
    c = job.compile
    if c.enable and not is_modelled(c):
        notes.append(f"compile: not modelled with compile.backend = {show(c.backend)}; {_WITHOUT_COMPILE}")
    elif c.enable:
        notes.append(
            "compile: the job's graphs are traced; which of their operators become one kernel follows from rules like "
            "Inductor's, and Inductor does not run"
        )
        ignored = [f"compile.{name}" for name in ("mode", "options") if getattr(c, name) is not None]
        if ignored:
            notes.append(f"{' and '.join(ignored)}: not modelled; Inductor's default is assumed")
        if "optimizer" in c.components:
            notes.append(f"compile of the optimizer's step: not modelled; {_WITHOUT_COMPILE}")
    if job.parallelism.enable_async_tensor_parallel or job.parallelism.enable_fsdp_symm_mem:
        notes.append(
            "symmetric memory (async tensor parallelism, FSDP): not modelled; its buffers come on top"
        )
    if job.parallelism.expert_parallel_degree > 1:
        notes.append("experts: tokens are assumed to be routed evenly")
    if documents.document_keyword(job, resolve.hf_config(job)) is not None:
        notes.append("documents: estimated as if joined, without the masks that keep them apart")
    return notes
