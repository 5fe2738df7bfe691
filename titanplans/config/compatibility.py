"""What contradicts what: every refusal that follows from options alone, in one table.

Two kinds of rows: `Needs` for options that do nothing unless another one has some value, `Rule` for all else, with the
reason and the remedy in words. They are read where a group of options is made (`RULES`, by the name of the class), so a
job, a strategy in Python and the command line refuse alike. What depends on the mesh, the device or the model is in
`PLACEMENT`, whose facts `parallelize` fills in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from titanplans.config.other_names import REFUSED
from titanplans.config.values import show
from titanplans.errors import either, near_multiples


class Rule(NamedTuple):
    """`option` is refused where `broken` says so, for the reason `why`."""

    option: str
    """One of a nested group as "compile.mode"."""
    broken: Callable[[Any], Any]
    """Given the options."""
    why: str | Callable[[Any], str]

    def refusals(self, options: Any) -> Iterator[tuple[str, str]]:
        """Yield the option and the reason, if it is refused."""
        if self.broken(options):
            yield self.option, self.why if isinstance(self.why, str) else self.why(options)


class Needs(NamedTuple):
    """Options that do nothing unless `switch` has one of `values`: refused with another value than their default."""

    names: tuple[str, ...]
    switch: str
    values: tuple[Any, ...]

    def refusals(self, options: Any) -> Iterator[tuple[str, str]]:
        """Yield each option that does nothing, and why."""
        value = _get(options, self.switch)
        if value in self.values:
            return
        for name in self.names:
            if _get(options, name) != _default(options, name):
                choices = either([show(choice) for choice in self.values])
                yield (
                    name,
                    f"it does nothing with {self.switch} = {'unset' if value is None else show(value)}: set that to "
                    f"{choices}, or leave this out",
                )


def _get(options: Any, name: str) -> Any:
    for part in name.split("."):
        options = getattr(options, part)
    return options


def _default(options: Any, name: str) -> Any:
    """Return the default of an option, which for a section of a job is the job's."""
    from titanplans.config.options import options_of

    first, _, rest = name.partition(".")
    default = next(field.default for field in options_of(type(options)) if field.name == first)
    return _get(default, rest) if rest else default


# ---------------------------------------------------------------- one group of options

_RECOMPUTING = ("full", "selective", "mlp", "keep_mixer")
_PER_OPERATOR = (
    "per_op_sac_matmuls",
    "per_op_sac_keep_attention",
    "per_op_sac_keep_collectives",
    "per_op_sac_keep_operators",
    "per_op_sac_force_recompute_mm_shapes_by_fqns",
)
_ACTIVATION_CHECKPOINT = (
    Needs(("scope",), "mode", (*_RECOMPUTING, "memory_budget")),
    Needs(("preserve_rng_state", "determinism_check", "early_stop", "debug"), "mode", _RECOMPUTING),
    Needs(("memory_budget", "visualize_memory_budget_pareto"), "mode", ("memory_budget",)),
    Needs(_PER_OPERATOR, "mode", ("selective",)),
    Needs(_PER_OPERATOR, "selective_ac_option", ("op",)),
    Rule(
        "per_op_sac_force_recompute_mm_shapes_by_fqns",
        lambda c: c.per_op_sac_force_recompute_mm_shapes_by_fqns and c.per_op_sac_matmuls == "none",
        'it makes exceptions from what per_op_sac_matmuls keeps, which is "none": leave one of the two out',
    ),
)

_COMPILE = (
    Rule(
        "components",
        lambda c: c.enable and not c.components,
        'nothing is compiled so: name "model", "loss" or "optimizer"',
    ),
    Rule(
        "components",
        lambda c: len(set(c.components)) < len(c.components),
        "one is named twice: once is enough",
    ),
    Rule(
        "fullgraph",
        lambda c: c.enable and c.fullgraph and "optimizer" in c.components,
        'an optimizer\'s step is several graphs: leave fullgraph out, or "optimizer" out of components',
    ),
    Rule(
        "options",
        lambda c: c.enable and c.mode is not None and c.options is not None,
        "compile.mode and compile.options exclude each other: leave one of the two out",
    ),
)

_FLOAT8 = (
    # A filter alone stands in jobs of torchtitan, which has another switch.
    Needs(
        (
            "filter_unaligned",
            "emulate",
            "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp",
        ),
        "recipe_name",
        ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    ),
    Rule(
        "enable_fsdp_float8_all_gather",
        lambda c: c.enable_fsdp_float8_all_gather and c.recipe_name != "tensorwise",
        lambda c: (
            f'a weight that is gathered in float8 has one scale, and recipe_name = "{c.recipe_name}" has one a row: take '
            "tensorwise, or gather in high precision"
        ),
    ),
    Needs(("precompute_float8_dynamic_scale_for_fsdp",), "enable_fsdp_float8_all_gather", (True,)),
)

_DDP = (
    Rule(
        "bucket_cap_mb",
        lambda c: c.bucket_cap_mb is not None and c.bucket_cap_mb * 2**20 < 1,
        "MiB of gradients in one all-reduce, a byte at least; torch's default is 25",
    ),
    Rule(
        "static_graph",
        lambda c: c.static_graph and c.find_unused_parameters,
        "the first step tells which parameters are unused: set find_unused_parameters to false",
    ),
    Rule(
        "static_graph",
        lambda c: c.static_graph and c.defer_grad_sync,
        "torch then can't defer sums of gradients (pytorch #143580): set defer_grad_sync to false",
    ),
    Rule(
        "bucket_cap_mb",
        lambda c: c.split_compiled_blocks and c.bucket_cap_mb is not None and c.bucket_cap_mb < 1,
        "split_compiled_blocks needs at least 1, which is torch's first bucket",
    ),
)

# ---------------------------------------------------------------- a strategy

_SHARED = (
    # In a job, `strategy_of` leaves these out: [compile] enable and recipe_name are switches that the others wait for.
    Needs(
        tuple(f"compile.{name}" for name in ("backend", "mode", "fullgraph", "dynamic", "options")),
        "compile.enable",
        (True,),
    ),
    Needs(("compile.mode", "compile.options"), "compile.backend", ("inductor",)),
    Needs(("float8.filter_fqns",), "float8.recipe_name", ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
    Rule(
        "activation_checkpoint.mode",
        lambda c: c.activation_checkpoint.mode == "memory_budget" and not c.compile.blocks,
        'the compiler chooses, and no block is compiled: set compile.enable to true with "model" in compile.components',
    ),
    Rule(
        "activation_checkpoint.mode",
        lambda c: c.activation_checkpoint.mode == "keep_mixer" and c.compile.blocks,
        "a kept mixer can't be in a compiled block: set compile.enable to false, or take mlp",
    ),
)

_FSDP2_CONFIG = (
    *_SHARED,
    Needs(("pin_cpu_memory",), "enable_cpu_offload", (True,)),
    Needs(("mixed_precision_cast_inputs",), "mixed_precision_param", ("bfloat16", "float32")),
    Needs(("async_tensor_parallel_unfused",), "enable_async_tensor_parallel", (True,)),
    Rule(
        "fsdp_backward_prefetch",
        lambda c: c.fsdp_backward_prefetch and c.fsdp_reshard_after_forward in ("never", 1),
        lambda c: (
            f"with fsdp_reshard_after_forward = {c.fsdp_reshard_after_forward!r} the backward gathers nothing: set one of "
            "them to its default"
        ),
    ),
    Rule(
        "autocast_dtype",
        lambda c: (
            c.autocast_dtype is not None
            and c.mixed_precision_param not in (None, "float32", c.autocast_dtype)
        ),
        lambda c: (
            f'mixed_precision_param = "{c.mixed_precision_param}" already casts what it computes: leave one of the two out'
        ),
    ),
    Rule(
        "enable_fsdp_symm_mem",
        lambda c: c.enable_fsdp_symm_mem and c.float8.enable_fsdp_float8_all_gather,
        "it has an all-gather of its own, and so has enable_fsdp_float8_all_gather: leave one of them out",
    ),
    Rule(
        "enable_async_tensor_parallel",
        lambda c: c.enable_async_tensor_parallel and _missing_for_async_tp(c, c.compile),
        lambda c: f"it needs {' and '.join(_missing_for_async_tp(c, c.compile))}",
    ),
)


def _missing_for_async_tp(config: Any, compiled: Any, **more: bool) -> list[str]:
    needs = {
        "enable_sequence_parallel = true": config.enable_sequence_parallel,
        'compile.enable = true with "model" in compile.components': compiled.blocks,
        'compile.backend = "inductor"': compiled.backend == "inductor",
    }
    return [need for need, held in (needs | more).items() if not held]


def _missing_in_job(job: Any) -> list[str]:
    degree, length = job.parallelism.tensor_parallel_degree, job.training.seq_len
    more = {
        "tensor_parallel_degree above 1": degree > 1,
        # Otherwise the last shard is padded, and in each block padding stands before each product.
        f"training.seq_len = {length} to be a multiple of tensor_parallel_degree = {degree}": length % degree
        == 0,
    }
    return _missing_for_async_tp(job.parallelism, job.compile, **more)


_DDP_CONFIG = (
    *_DDP,
    *_SHARED,
    Rule(
        "split_compiled_blocks",
        lambda c: c.split_compiled_blocks and not c.compile.blocks,
        'no block is compiled: set compile.enable to true with "model" in compile.components',
    ),
    Rule(
        "float8.enable_fsdp_float8_all_gather",
        lambda c: c.float8.enable_fsdp_float8_all_gather,
        "DDP gathers no weights: take fsdp2, or leave it out",
    ),
)

# ---------------------------------------------------------------- a job

_FSDP2_ONLY = (
    *(
        f"parallelism.fsdp_{name}"
        for name in ("reshard_after_forward", "forward_prefetch", "backward_prefetch")
    ),
    *(f"parallelism.fsdp_{name}" for name in ("towers", "defer_grad_sync", "keep_gathered")),
    "parallelism.enable_fsdp_symm_mem",
    "parallelism.tensor_parallel_degree",
    "training.enable_cpu_offload",
    "training.pin_cpu_memory",
    "training.mixed_precision_reduce",
    "training.mixed_precision_output",
    "training.mixed_precision_cast_inputs",
    "validation.unshard",
)
"""Keys that DDP has no counterpart of."""
_DDP_ONLY = (
    "bucket_cap_mb",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
)
_STRATEGY = "parallelism.data_parallel_strategy"


def schedule_steps(job: Any) -> int:
    """Return the length of the learning-rate schedule: the run's, but never shorter than its warm-up."""
    if job.lr_scheduler.total_steps is not None:
        return job.lr_scheduler.total_steps
    return max(job.training.steps, job.lr_scheduler.warmup_steps)


def _decay_steps(job: Any) -> int:
    return round(schedule_steps(job) * (job.lr_scheduler.decay_ratio or 0))


def _tokens(job: Any) -> int:
    return job.training.local_batch_size * job.training.seq_len


_JOB = (
    *(
        Rule(
            f"parallelism.{key}",
            lambda job, key=key: getattr(job.parallelism, key) != 1,
            REFUSED[f"parallelism.{key}"].reason,
        )
        for key in ("pipeline_parallel_degree", "context_parallel_degree")
    ),
    Rule(
        "parallelism.data_parallel_strategy",
        lambda job: _get(job, _STRATEGY) == "megatron_fsdp",
        "it is not supported in a job: torchtitan's trainer initialises and saves models in ways that its wrapper has not: "
        'take "fsdp2", or in a loop of your own ParallelManager(MegatronFSDPConfig())',
    ),
    Needs(
        tuple(f"ddp.{name}" for name in (*_DDP_ONLY, "defer_grad_sync", "split_compiled_blocks")),
        _STRATEGY,
        ("ddp",),
    ),
    Needs(_FSDP2_ONLY, _STRATEGY, ("fsdp2",)),
    Rule(
        "parallelism.data_parallel_shard_degree",
        lambda job: _get(job, _STRATEGY) == "ddp" and job.parallelism.data_parallel_shard_degree > 1,
        'DDP copies whole models: take parallelism.data_parallel_strategy = "fsdp2" with data_parallel_replicate_degree for '
        "the copies, or leave the degree out",
    ),
    Rule(
        "model.config",
        lambda job: job.model.config is not None and (job.model.name or job.model.flavor) is not None,
        lambda job: (
            "it already says which model: leave out model."
            + " and model.".join(key for key in ("name", "flavor") if getattr(job.model, key) is not None)
        ),
    ),
    Rule(
        "model.plan",
        lambda job: job.model.plan is not None and job.parallelism.tensor_parallel_degree == 1,
        "parallelism.tensor_parallel_degree = 1 splits nothing: raise it, or leave the plan out",
    ),
    Rule(
        "training.gradient_accumulation_steps",
        lambda job: job.training.global_batch_size != -1 and job.training.gradient_accumulation_steps != 1,
        lambda job: (
            f"training.global_batch_size = {job.training.global_batch_size} fixes the accumulation, too: keep one of them"
        ),
    ),
    Rule(
        "training.global_batch_size",
        lambda job: (
            job.training.global_batch_size != -1
            and job.training.global_batch_size % job.training.local_batch_size
        ),
        lambda job: (
            f"it is not a multiple of training.local_batch_size = {job.training.local_batch_size}: "
            f"{near_multiples(job.training.global_batch_size, job.training.local_batch_size)} would work"
        ),
    ),
    *(
        Rule(
            f"{section}.dataloader.{key}",
            lambda job, loader=f"{section}.dataloader", key=key: (
                _get(job, f"{loader}.{key}") and _get(job, f"{loader}.num_workers") == 0
            ),
            f"it needs workers: set {section}.dataloader.num_workers above 0",
        )
        for section in ("training", "validation")
        for key in ("persistent_workers", "prefetch_factor")
    ),
    Rule(
        "lr_scheduler.total_steps",
        lambda job: (job.lr_scheduler.total_steps or job.training.steps) < job.training.steps,
        lambda job: (
            f"it ends before training.steps = {job.training.steps}, and the learning rate would turn negative: give "
            f"{job.training.steps} or more, or leave it out"
        ),
    ),
    Rule(
        "lr_scheduler.warmup_steps",
        lambda job: (
            job.lr_scheduler.total_steps is not None
            and job.lr_scheduler.warmup_steps > job.lr_scheduler.total_steps
        ),
        lambda job: (
            f"it is longer than lr_scheduler.total_steps = {job.lr_scheduler.total_steps}: lower it, or raise total_steps"
        ),
    ),
    Rule(
        "lr_scheduler.decay_ratio",
        lambda job: (
            job.lr_scheduler.decay_ratio is not None
            and job.lr_scheduler.warmup_steps + _decay_steps(job) > schedule_steps(job)
        ),
        lambda job: (
            f"it is {_decay_steps(job)} steps, which with lr_scheduler.warmup_steps = {job.lr_scheduler.warmup_steps} don't "
            f"fit into {schedule_steps(job)}: lower one of them, or set lr_scheduler.total_steps to the length of the run"
        ),
    ),
    Rule(
        "optimizer.implementation",
        lambda job: (
            job.compile.enable
            and "optimizer" in job.compile.components
            and job.optimizer.implementation.startswith("fused")
        ),
        'it is one kernel, of which nothing is left to compile: set it to "foreach", or leave "optimizer" out of '
        "compile.components",
    ),
    Rule(
        "parallelism.enable_async_tensor_parallel",
        lambda job: job.parallelism.enable_async_tensor_parallel and _missing_in_job(job),
        lambda job: f"it needs {' and '.join(_missing_in_job(job))}",
    ),
    Rule(
        "training.local_batch_size",
        lambda job: job.quantize.linear.float8.recipe_name is not None and _tokens(job) % 16,
        lambda job: (
            f"times training.seq_len = {job.training.seq_len} is {_tokens(job)} tokens, and float8 multiplies over "
            f"multiples of 16: {near_multiples(_tokens(job), 16)} would work"
        ),
    ),
    Rule(
        "checkpoint.folder",
        lambda job: not job.checkpoint.folder.strip(),
        'it names no folder: "checkpoint" is the default',
    ),
    Needs(
        tuple(
            f"checkpoint.{key}"
            for key in ("initial_load_path", "load_step", "load_only", "create_seed_checkpoint")
        ),
        "checkpoint.enable",
        (True,),
    ),
    *(
        Rule(
            f"checkpoint.{key}",
            lambda job, key=key: job.checkpoint.load_only and getattr(job.checkpoint, key),
            "it saves, and checkpoint.load_only = true forbids it: keep one of them",
        )
        for key in ("enable_first_step_checkpoint", "create_seed_checkpoint")
    ),
    Rule(
        "checkpoint.initial_load_model_only",
        lambda job: not job.checkpoint.initial_load_model_only and job.checkpoint.initial_load_path is None,
        "it needs checkpoint.initial_load_path",
    ),
    Rule(
        "profiling.profile_freq",
        lambda job: (
            job.profiling.enable_profiling
            and job.profiling.profile_freq < job.profiling.profiler_warmup + job.profiling.profiler_active
        ),
        lambda job: (
            f"it is shorter than profiler_warmup + profiler_active = {job.profiling.profiler_warmup} + "
            f"{job.profiling.profiler_active}: {job.profiling.profiler_warmup + job.profiling.profiler_active} or more "
            "would work"
        ),
    ),
    Needs(("debug.deterministic_warn_only",), "debug.deterministic", (True,)),
)

# ---------------------------------------------------------------- a strategy on a mesh, for a model


@dataclass(frozen=True)
class Placement:
    """A strategy, and what it meets: read by the rows below. Not a group of options."""

    config: Any
    """An FSDP2Config or a DDPConfig."""
    tp: int
    dp_replicate: int
    dp_shard: int
    device_type: str
    nccl: bool
    """Whether the ranks of the tensor-parallel group communicate by NCCL."""
    one_graph: bool
    """Whether each block of the model can become one graph."""

    @property
    def ac(self) -> Any:
        """What recomputes."""
        return self.config.activation_checkpoint


PLACEMENT = (
    Rule(
        "plan",
        lambda p: getattr(p.config, "plan", None) is not None and p.tp == 1,
        "tensor_parallel_degree = 1 splits nothing: raise it, or leave the plan out",
    ),
    Rule(
        "fsdp_defer_grad_sync",
        lambda p: getattr(p.config, "fsdp_defer_grad_sync", None) == "replicas" and p.dp_replicate == 1,
        "there is one copy of the model (data_parallel_replicate_degree = 1), and no sum over copies to wait with: set it "
        "to all or nothing, or data_parallel_replicate_degree above 1",
    ),
    Rule(
        "float8.enable_fsdp_float8_all_gather",
        lambda p: p.config.float8.enable_fsdp_float8_all_gather and p.dp_shard == 1,
        "data_parallel_shard_degree = 1 gathers nothing: raise it, or leave this out",
    ),
    Rule(
        "fsdp_reshard_after_forward",
        lambda p: (
            p.config.float8.enable_fsdp_float8_all_gather
            and isinstance(p.config.fsdp_reshard_after_forward, int)
            and p.config.fsdp_reshard_after_forward > 1
        ),
        "FSDP2 can't gather float8 from the ranks of a smaller group (enable_fsdp_float8_all_gather): take default, always "
        "or never, or gather in high precision",
    ),
    Rule(
        "float8.enable_fsdp_float8_all_gather",
        lambda p: (
            p.config.float8.enable_fsdp_float8_all_gather
            and p.tp > 1
            and not p.config.float8.precompute_float8_dynamic_scale_for_fsdp
        ),
        "with tensor parallelism each gather would seek the scale of one rank's share, not of the weight: set "
        "precompute_float8_dynamic_scale_for_fsdp to true, or leave this out",
    ),
    Rule(
        "autocast_dtype",
        lambda p: p.config.autocast_dtype == "float32" and p.device_type == "cpu",
        "on a CPU torch's autocast takes bfloat16 alone, and does nothing otherwise: leave it out",
    ),
    Rule(
        "enable_fsdp_symm_mem",
        lambda p: getattr(p.config, "enable_fsdp_symm_mem", False) and p.device_type != "cuda",
        lambda p: f"it needs CUDA, and this mesh is on {p.device_type}: leave it out",
    ),
    Rule(
        "compile.mode",
        lambda p: (
            p.config.compile.enable
            and p.device_type == "cpu"
            and p.config.compile.mode not in (None, "default")
        ),
        "it changes nothing on a CPU, where inductor captures no CUDA graphs and tunes no product of a model in training: "
        "leave it out, or run on a GPU",
    ),
    Rule(
        "compile.backend",
        lambda p: (
            p.config.compile.enable and p.device_type == "cpu" and p.config.compile.backend == "cudagraphs"
        ),
        "it needs a GPU: take inductor on a CPU",
    ),
    Rule(
        "compile.options",
        lambda p: p.config.compile.enable and _foreign(p),
        lambda p: f"inductor does not read {_foreign(p)!r} on device type {p.device_type!r}: leave it out",
    ),
    Rule(
        "enable_async_tensor_parallel",
        lambda p: getattr(p.config, "enable_async_tensor_parallel", False) and (p.tp == 1 or not p.nccl),
        lambda p: (
            "it needs "
            + " and ".join(
                [
                    *["tensor_parallel_degree above 1"] * (p.tp == 1),
                    *["CUDA with NCCL"] * (p.tp > 1 and not p.nccl),
                ]
            )
            + ": add what is missing, or leave it out"
        ),
    ),
    Rule(
        "compile.fullgraph",
        lambda p: p.config.compile.blocks and p.config.compile.fullgraph and not p.one_graph,
        "blocks hold modules of flash-linear-attention, whose kernels take themselves out of every graph: leave it out",
    ),
    Rule(
        "activation_checkpoint.mode",
        lambda p: (
            p.config.compile.blocks
            and not p.one_graph
            and p.ac.mode == "selective"
            and p.ac.selective_ac_option == "op"
        ),
        "compiled blocks that hold modules of flash-linear-attention are several graphs, in which no operator can be kept: "
        'take full, selective with selective_ac_option = "2", mlp or memory_budget, or set compile.enable to false',
    ),
    Rule(
        "activation_checkpoint.mode",
        lambda p: p.config.compile.blocks and p.one_graph and p.tp > 1 and _recomputes_attention(p.ac),
        lambda p: (
            f"that computes attention again fails with compile and tensor_parallel_degree = {p.tp} in torch 2.13 where a "
            "block is one graph: its partitioner counts the random state of attention behind the device mesh; keep "
            'attention\'s output (selective_ac_option = "op", mlp or memory_budget), or set compile.enable to false'
        ),
    ),
)


def _foreign(placement: Placement) -> str | None:
    """Return the first of inductor's settings that is another device's."""
    prefixes = ("triton.", "cuda.", "cutlass.", "rocm.") if placement.device_type == "cpu" else ("cpp.",)
    return next((key for key in placement.config.compile.options or () if key.startswith(prefixes)), None)


def _recomputes_attention(ac: Any) -> bool:
    """Whether attention, which the compiler takes for a random operator, lies in what is recomputed."""
    if ac.mode == "selective" and ac.selective_ac_option == "op":
        return not ac.per_op_sac_keep_attention
    return ac.mode in ("full", "selective", "keep_mixer")


RULES: dict[str, tuple[Rule | Needs, ...]] = {
    "ActivationCheckpoint": _ACTIVATION_CHECKPOINT,
    "Compile": _COMPILE,
    "Float8": _FLOAT8,
    "FSDP2Config": _FSDP2_CONFIG,
    "DDPConfig": _DDP_CONFIG,
    "JobConfig": _JOB,
}
"""The rows by the class whose options they read."""


def check_placement(placement: Placement) -> None:
    """Refuse a strategy that can't be honoured on its mesh, on its device or for its model.

    Raises:
        OptionError: the first row that refuses it.
    """
    for rule in PLACEMENT:
        for option, why in rule.refusals(placement):
            raise placement.config.error(option, why)
