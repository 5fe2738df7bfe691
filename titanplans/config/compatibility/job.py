"""What contradicts what in a job: its sections."""

from typing import Any

from titanplans.config.compatibility.strategy import NOTHING_IS_SPLIT, async_tensor_parallel
from titanplans.config.compatibility.words import fields, get, needs
from titanplans.config.options import Refusals
from titanplans.config.other_names import REFUSED
from titanplans.config.sections.parallelism import DDP, FSDP2, MixedPrecision, Offload
from titanplans.errors import near_multiples


def schedule_steps(job: Any) -> int:
    """Return the length of the learning-rate schedule: the run's, but never shorter than its warm-up."""
    return job.lr_scheduler.total_steps or max(job.training.steps, job.lr_scheduler.warmup_steps)


def refusals(job: Any) -> Refusals:
    """Yield what the sections of a job contradict in one another."""
    yield from _parallelism(job)
    yield from _batches(job)
    yield from _schedule(job)
    yield from _files(job)
    yield from needs(job, "debug.deterministic", (True,), "debug.deterministic_warn_only")


def _parallelism(job: Any) -> Refusals:
    p, strategy = job.parallelism, "parallelism.data_parallel_strategy"
    for key in ("parallelism.pipeline_parallel_degree", "parallelism.context_parallel_degree"):
        if get(job, key) != 1:
            yield key, REFUSED[key].reason
    if p.data_parallel_strategy == "megatron_fsdp":
        yield (
            strategy,
            "it is not supported in a job: torchtitan's trainer initialises and saves models in ways that its wrapper has "
            'not: take "fsdp2", or in a loop of your own ParallelManager(MegatronFSDPConfig())',
        )
    # Options that a strategy does not have. Under DDP, mixed_precision_param is autocast.
    yield from needs(job, strategy, ("ddp",), *(f"ddp.{name}" for name in fields(DDP)))
    fsdp2 = [
        f"training.{name}" for name in fields(Offload, MixedPrecision) if name != "mixed_precision_param"
    ]
    fsdp2 += [f"parallelism.{name}" for name in (*fields(FSDP2), "tensor_parallel_degree")]
    yield from needs(job, strategy, ("fsdp2",), *fsdp2, "validation.unshard")
    if p.data_parallel_strategy == "ddp" and p.data_parallel_shard_degree > 1:
        yield (
            "parallelism.data_parallel_shard_degree",
            f'DDP copies whole models: take {strategy} = "fsdp2" with data_parallel_replicate_degree for the copies, or '
            "leave the degree out",
        )
    if job.model.config is not None and (job.model.name or job.model.flavor):
        given = " and ".join(f"model.{key}" for key in ("name", "flavor") if getattr(job.model, key))
        yield "model.config", f"it already says which model: leave out {given}"
    m = job.model
    if m.class_ is not None and (given := [k for k in ("name", "flavor", "config") if getattr(m, k)]):
        yield (
            "model.class",
            f"it already says which model: leave out {' and '.join(f'model.{k}' for k in given)}",
        )
    if m.class_ is None and m.arguments is not None:
        yield (
            "model.arguments",
            "these are keywords of a model.class, and there is none: name it, or leave them out",
        )
    degree, length = p.tensor_parallel_degree, job.training.seq_len
    if job.model.plan is not None and degree == 1:
        yield "model.plan", f"parallelism.{NOTHING_IS_SPLIT}"
    # A length that is no multiple: the last shard is padded, and in each block padding stands before each product.
    multiple = f"training.seq_len = {length} to be a multiple of tensor_parallel_degree = {degree}"
    splits = {"tensor_parallel_degree above 1": degree > 1, multiple: length % degree == 0}
    yield from async_tensor_parallel("parallelism.enable_async_tensor_parallel", p, job.compile, **splits)


def _batches(job: Any) -> Refusals:
    t = job.training
    if t.global_batch_size != -1 and t.gradient_accumulation_steps != 1:
        yield (
            "training.gradient_accumulation_steps",
            f"training.global_batch_size = {t.global_batch_size} fixes the accumulation, too: keep one of them",
        )
    if t.global_batch_size != -1 and t.global_batch_size % t.local_batch_size:
        works = near_multiples(t.global_batch_size, t.local_batch_size)
        yield (
            "training.global_batch_size",
            f"it is not a multiple of training.local_batch_size = {t.local_batch_size}: {works} would work",
        )
    tokens = t.local_batch_size * t.seq_len
    if job.quantize.linear.float8.recipe_name is not None and tokens % 16:
        yield (
            "training.local_batch_size",
            f"times training.seq_len = {t.seq_len} is {tokens} tokens, and float8 multiplies over multiples of 16: "
            f"{near_multiples(tokens, 16)} would work",
        )
    yield from needs(
        job, "training.chat.enable", (True,), *(f"training.chat.{name}" for name in fields(type(t.chat)))
    )
    if t.chat.enable and t.text_column != "text":
        yield (
            "training.text_column",
            "training.chat reads conversations: name training.chat.messages_column, and leave this out",
        )
    if t.chat.enable and job.validation.text_column is not None:
        yield "validation.text_column", "training.chat reads conversations here, too: leave this out"
    for loader in ("training.dataloader", "validation.dataloader"):
        for key in ("persistent_workers", "prefetch_factor"):
            if get(job, f"{loader}.{key}") and get(job, f"{loader}.num_workers") == 0:
                yield f"{loader}.{key}", f"it needs workers: set {loader}.num_workers above 0"


def _schedule(job: Any) -> Refusals:
    s, steps, length = job.lr_scheduler, job.training.steps, schedule_steps(job)
    if length < steps:
        yield (
            "lr_scheduler.total_steps",
            f"it ends before training.steps = {steps}, and the learning rate would turn negative: give {steps} or more, "
            "or leave it out",
        )
    if s.warmup_steps > length:
        yield (
            "lr_scheduler.warmup_steps",
            f"it is longer than lr_scheduler.total_steps = {length}: lower it, or raise total_steps",
        )
    decay = round(length * (s.decay_ratio or 0))
    if s.decay_ratio is not None and s.warmup_steps + decay > length:
        yield (
            "lr_scheduler.decay_ratio",
            f"it is {decay} steps, which with lr_scheduler.warmup_steps = {s.warmup_steps} don't fit into {length}: "
            "lower one of them, or set lr_scheduler.total_steps to the length of the run",
        )
    compiled = job.compile.enable and "optimizer" in job.compile.components
    if compiled and "Muon" in (job.optimizer.name, *(group.name for group in job.optimizer.groups)):
        yield (
            "compile.components",
            'Muon\'s step communicates between its products, and is not compiled: leave "optimizer" out',
        )
    if compiled and job.optimizer.implementation.startswith("fused"):
        yield (
            "optimizer.implementation",
            'it is one kernel, of which nothing is left to compile: set it to "foreach", or leave "optimizer" out of '
            "compile.components",
        )


def _files(job: Any) -> Refusals:
    yield from needs(job, "training.skip_nan_inf", (True,), "training.skip_nan_inf_limit")
    c, p = job.checkpoint, job.profiling
    loading = (
        *(
            "initial_adapter_path",
            "save_adapters_only",
            "initial_load_path",
            "initial_load_in_hf",
            "load_step",
            "load_only",
        ),
        *("create_seed_checkpoint", "save_on_signal", "last_save_in_hf"),
    )
    yield from needs(job, "checkpoint.enable", (True,), *(f"checkpoint.{key}" for key in loading))
    for key in (
        "enable_first_step_checkpoint",
        "create_seed_checkpoint",
        "save_on_signal",
        "last_save_in_hf",
    ):
        if c.load_only and getattr(c, key):
            yield (
                f"checkpoint.{key}",
                "it saves, and checkpoint.load_only = true forbids it: keep one of them",
            )
    for key in ("initial_adapter_path", "save_adapters_only"):
        if getattr(c, key) and job.lora.rank is None:
            yield (
                f"checkpoint.{key}",
                "it is for adapters, and there are none: set lora.rank, or leave it out",
            )
    if c.save_adapters_only and c.initial_load_path is None and not c.initial_load_in_hf:
        yield (
            "checkpoint.save_adapters_only",
            "the weights beside the adapters would be nowhere: set checkpoint.initial_load_path to where they come from",
        )
    if not c.initial_load_model_only and c.initial_load_path is None:
        yield "checkpoint.initial_load_model_only", "it needs checkpoint.initial_load_path"
    if c.create_seed_checkpoint and (c.initial_load_path is not None or c.initial_load_in_hf):
        yield (
            "checkpoint.create_seed_checkpoint",
            "it saves the weights that debug.seed draws, and nothing is loaded: leave out initial_load_path, or this",
        )
    if c.last_save_in_hf and not c.last_save_model_only:
        yield (
            "checkpoint.last_save_in_hf",
            "such a folder holds weights alone: leave last_save_model_only at true",
        )
    if c.last_save_in_hf and c.create_seed_checkpoint:
        yield (
            "checkpoint.last_save_in_hf",
            "a seed is a distributed checkpoint: titanplans export makes a folder of it",
        )
    if c.initial_load_in_hf and not c.initial_load_model_only:
        yield "checkpoint.initial_load_model_only", "a Hugging Face folder holds weights alone: leave it out"
    if c.initial_load_in_hf and c.initial_load_path is None and job.model.hf_assets_path is None:
        yield (
            "checkpoint.initial_load_in_hf",
            "it needs the folder, as checkpoint.initial_load_path or model.hf_assets_path",
        )
    shortest = p.profiler_warmup + p.profiler_active
    if p.enable_profiling and p.profile_freq < shortest:
        yield (
            "profiling.profile_freq",
            f"it is shorter than profiler_warmup + profiler_active = {p.profiler_warmup} + {p.profiler_active}: "
            f"{shortest} or more would work",
        )
