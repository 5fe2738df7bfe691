"""Options that contradict each other, whatever the machine, the data and the number of processes."""

from collections.abc import Iterable, Iterator

from titanplans.config.refused import REFUSED
from titanplans.config.schema import JobConfig, keys
from titanplans.config.sections.model import DataLoader
from titanplans.config.values import show
from titanplans.errors import ConfigError, near_multiples


def check_values(job: JobConfig) -> None:
    """Raise a ConfigError for the first contradiction, naming both keys and what would resolve it."""
    for problems in (
        _degrees,
        _strategy,
        _model,
        _batch,
        _schedule,
        _recomputation,
        _compile,
        _float8,
        _validation,
        _checkpoint,
        _profiling,
    ):
        for problem in problems(job):
            raise ConfigError(problem)


def _degrees(job: JobConfig) -> Iterator[str]:
    for key in ("pipeline_parallel_degree", "context_parallel_degree"):
        if getattr(job.parallelism, key) != 1:
            dotted = f"parallelism.{key}"
            yield f"{dotted} = {getattr(job.parallelism, key)} is not supported: {REFUSED[dotted].reason}"


_FSDP2_ONLY = (
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.fsdp_forward_prefetch",
    "parallelism.fsdp_backward_prefetch",
    "parallelism.fsdp_towers",
    "parallelism.fsdp_defer_grad_sync",
    "parallelism.fsdp_keep_gathered",
    "parallelism.enable_fsdp_symm_mem",
    "training.enable_cpu_offload",
    "training.pin_cpu_memory",
    "training.mixed_precision_reduce",
    "training.mixed_precision_output",
    "training.mixed_precision_cast_inputs",
    "validation.unshard",
)
"""Keys that DDP has no counterpart of."""


def _strategy(job: JobConfig) -> Iterator[str]:
    taken = f'parallelism.data_parallel_strategy = "{job.parallelism.data_parallel_strategy}"'
    if job.parallelism.data_parallel_strategy == "megatron_fsdp":
        yield (
            f"{taken} is not supported: torchtitan's trainer initialises and saves models in ways that its wrapper has not; "
            'take "fsdp2", or in a loop of your own parallel.ParallelManager(MegatronFSDPConfig())'
        )
    if job.parallelism.data_parallel_strategy != "ddp":
        for name in _changed(job, [f"ddp.{name}" for name in vars(job.ddp)]):
            yield f'{name} is given, and {taken}; set that to "ddp", or leave [ddp] out'
        return
    for key in ("tensor_parallel_degree", "data_parallel_shard_degree"):
        degree = getattr(job.parallelism, key)
        if degree > 1:
            yield (
                f"parallelism.{key} = {degree} and {taken}: DDP copies whole models; take "
                '"fsdp2" with data_parallel_replicate_degree for the copies, or leave the degree out'
            )
    for name in _changed(job, _FSDP2_ONLY):
        yield f'{name} is FSDP2\'s, and {taken}; leave it out, or take "fsdp2"'


def _changed(job: JobConfig, names: Iterable[str]) -> Iterator[str]:
    """Yield those of `names` whose value is not their default, as "section.key = value"."""
    for name in names:
        section, _, key = name.rpartition(".")
        value = getattr(getattr(job, section), key)
        if value != keys()[name].default:
            yield f"{name} = {show(value)}"


def _model(job: JobConfig) -> Iterator[str]:
    model = job.model
    given = [key for key in ("name", "flavor") if getattr(model, key) is not None]
    if model.config is not None and given:
        yield (
            f'model.config = "{model.config}" already says which model; leave out model.'
            + " and model.".join(given)
        )
    if model.plan is not None and job.parallelism.tensor_parallel_degree == 1:
        yield (
            "model.plan is given, but parallelism.tensor_parallel_degree = 1 splits nothing; raise it, or leave it out"
        )


def _batch(job: JobConfig) -> Iterator[str]:
    training = job.training
    if training.global_batch_size != -1 and training.gradient_accumulation_steps != 1:
        yield (
            f"training.gradient_accumulation_steps = {training.gradient_accumulation_steps} and "
            f"training.global_batch_size = {training.global_batch_size} both fix the accumulation; keep one of them"
        )
    if training.global_batch_size != -1 and training.global_batch_size % training.local_batch_size:
        yield (
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of "
            f"training.local_batch_size = {training.local_batch_size}; "
            f"{near_multiples(training.global_batch_size, training.local_batch_size)} would work"
        )
    yield from _loader("training", training.dataloader)


def _schedule(job: JobConfig) -> Iterator[str]:
    schedule, steps = job.lr_scheduler, job.training.steps
    total = schedule.total_steps
    if total is not None and total < steps:
        yield (
            f"lr_scheduler.total_steps = {total} ends before training.steps = {steps}, "
            f"and the learning rate would turn negative; give at least {steps}, or leave it out"
        )
    if total is not None and schedule.warmup_steps > total:
        yield (
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps} is longer than "
            f"lr_scheduler.total_steps = {total}; lower it, or raise total_steps"
        )
    if schedule.decay_ratio is not None:
        length = schedule_steps(job)
        decay = round(length * schedule.decay_ratio)
        if schedule.warmup_steps + decay > length:
            yield (
                f"lr_scheduler.warmup_steps = {schedule.warmup_steps} and lr_scheduler.decay_ratio = "
                f"{schedule.decay_ratio} ({decay} steps) don't fit into {length} steps; lower one of them, or set "
                "lr_scheduler.total_steps to the length of the whole run"
            )


def schedule_steps(job: JobConfig) -> int:
    """Return the length of the learning-rate schedule: the run's, but never shorter than its warm-up."""
    if job.lr_scheduler.total_steps is not None:
        return job.lr_scheduler.total_steps
    return max(job.training.steps, job.lr_scheduler.warmup_steps)


def _recomputation(job: JobConfig) -> Iterator[str]:
    ac = job.activation_checkpoint
    per_op = ac.mode == "selective" and ac.selective_ac_option == "op"
    if not per_op:
        for name in _changed(
            job, [f"activation_checkpoint.{key}" for key in vars(ac) if key.startswith("per_op_")]
        ):
            yield (
                f'{name} works only with activation_checkpoint.mode = "selective" and selective_ac_option = "op"'
            )
    if ac.mode == "memory_budget" and not _model_is_compiled(job):
        yield (
            'activation_checkpoint.mode = "memory_budget" is the compiler\'s work: '
            'set compile.enable = true, with "model" in compile.components'
        )


def _compile(job: JobConfig) -> Iterator[str]:
    if job.compile.enable and not job.compile.components:
        yield 'compile.enable = true, but compile.components = []; name "model", "loss" or "optimizer"'
    fused = job.optimizer.implementation.startswith("fused")
    if job.compile.enable and "optimizer" in job.compile.components and fused:
        yield (
            f'optimizer.implementation = "{job.optimizer.implementation}" is one kernel, of which nothing is left to '
            'compile: set it to "foreach", or leave "optimizer" out of compile.components'
        )
    parallel = job.parallelism
    if parallel.enable_async_tensor_parallel:
        wrong = [
            text
            for holds, text in (
                (parallel.tensor_parallel_degree > 1, "parallelism.tensor_parallel_degree above 1"),
                (parallel.enable_sequence_parallel, "parallelism.enable_sequence_parallel = true"),
                (_model_is_compiled(job), 'compile.enable = true with "model" in compile.components'),
                (job.compile.backend == "inductor", 'compile.backend = "inductor"'),
                # Otherwise the last shard is padded, and in each block padding stands before each product.
                (
                    job.training.seq_len % parallel.tensor_parallel_degree == 0,
                    "training.seq_len to be a multiple of parallelism.tensor_parallel_degree",
                ),
            )
            if not holds
        ]
        if wrong:
            yield f"parallelism.enable_async_tensor_parallel = true needs {' and '.join(wrong)}"
    elif parallel.async_tensor_parallel_unfused != "error":
        yield (
            f'parallelism.async_tensor_parallel_unfused = "{parallel.async_tensor_parallel_unfused}" does nothing without '
            "parallelism.enable_async_tensor_parallel = true"
        )


def _float8(job: JobConfig) -> Iterator[str]:
    section, float8 = "quantize.linear.float8", job.quantize.linear.float8
    if float8.recipe_name is None:
        # filter_fqns alone stands in jobs of torchtitan, which has another switch.
        flags = [key for key, value in vars(float8).items() if value is True]
        if flags:
            yield f"{section}.{flags[0]} = true, and nothing is float8; set {section}.recipe_name, or leave it out"
        return
    tokens = job.training.local_batch_size * job.training.seq_len
    if tokens % 16:
        yield (
            f"training.local_batch_size x training.seq_len = {job.training.local_batch_size} x {job.training.seq_len} = "
            f"{tokens} tokens: float8 multiplies over multiples of 16; {near_multiples(tokens, 16)} would work"
        )


def _model_is_compiled(job: JobConfig) -> bool:
    return job.compile.enable and "model" in job.compile.components


def _validation(job: JobConfig) -> Iterator[str]:
    yield from _loader("validation", job.validation.dataloader)


def _loader(section: str, loader: DataLoader) -> Iterator[str]:
    if loader.num_workers == 0:
        for key in ("persistent_workers", "prefetch_factor"):
            if getattr(loader, key):
                yield f"{section}.dataloader.{key} needs workers; set {section}.dataloader.num_workers above 0"


def _checkpoint(job: JobConfig) -> Iterator[str]:
    checkpoint = job.checkpoint
    if not checkpoint.folder.strip():
        yield 'checkpoint.folder = "" names no folder; "checkpoint" is the default'
    if not checkpoint.enable:
        for key, off in (
            ("initial_load_path", None),
            ("load_step", -1),
            ("load_only", False),
            ("create_seed_checkpoint", False),
        ):
            if getattr(checkpoint, key) != off:
                yield f"checkpoint.{key} is given, but nothing is loaded or saved; set checkpoint.enable = true"
    if checkpoint.load_only:
        for key in ("enable_first_step_checkpoint", "create_seed_checkpoint"):
            if getattr(checkpoint, key):
                yield f"checkpoint.{key} saves, and checkpoint.load_only = true forbids it; keep one of them"
    if not checkpoint.initial_load_model_only and checkpoint.initial_load_path is None:
        yield "checkpoint.initial_load_model_only = false needs checkpoint.initial_load_path"


def _profiling(job: JobConfig) -> Iterator[str]:
    profiling = job.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        yield (
            f"profiling.profile_freq = {profiling.profile_freq} is shorter than profiler_warmup + profiler_active = "
            f"{profiling.profiler_warmup} + {profiling.profiler_active}; {needed} or more would work"
        )
    if job.debug.deterministic_warn_only and not job.debug.deterministic:
        yield "debug.deterministic_warn_only does nothing without debug.deterministic = true"
