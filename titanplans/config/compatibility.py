"""What contradicts what: every refusal that follows from options alone, in one file.

One function a group of options, which yields each option that is refused, and the reason with the remedy. It is called where
the group is made (`REFUSALS`, by the name of the class), so a job, a strategy in Python and the command line refuse alike.
What depends on the mesh, the device or the model is in `check_placement`, whose facts `parallelize` knows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from titanplans.config.other_names import REFUSED
from titanplans.config.values import show
from titanplans.errors import either, near_multiples

Refusals = Iterator[tuple[str, str]]
"""An option, one of a nested group as "compile.mode", and why it is refused."""


def _needs(options: Any, switch: str, values: Iterable[Any], *names: str) -> Refusals:
    """Refuse another value than their default of options that do nothing unless `switch` has one of `values`."""
    value, choices = _get(options, switch), either([show(choice) for choice in values])
    for name in names:
        if value not in values and _get(options, name) != _default(options, name):
            now = "unset" if value is None else show(value)
            yield name, f"it does nothing with {switch} = {now}: set that to {choices}, or leave this out"


def _get(options: Any, name: str) -> Any:
    for part in name.split("."):
        options = getattr(options, part)
    return options


def _default(options: Any, name: str) -> Any:
    """Return the default of an option, which for a section of a job is the job's."""
    first, _, rest = name.partition(".")
    default = _fields(type(options))[first]
    return _get(default, rest) if rest else default


def _fields(*groups: Any) -> dict[str, Any]:
    """Return the options of some groups by name, with their defaults."""
    from titanplans.config.options import options_of

    return {field.name: field.default for group in groups for field in options_of(group)}


# ---------------------------------------------------------------- one group of options

_RECOMPUTING = ("full", "selective", "mlp", "keep_mixer")
_WITH_ATTENTION = ("full", "selective", "keep_mixer")
_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_NOTHING_IS_SPLIT = "tensor_parallel_degree = 1 splits nothing: raise it, or leave the plan out"
_NOT_COMPILED = 'no block is compiled: set compile.enable to true with "model" in compile.components'


def _activation_checkpoint(c: Any) -> Refusals:
    shapes = "per_op_sac_force_recompute_mm_shapes_by_fqns"
    per_operator = [name for name in _fields(type(c)) if name.startswith("per_op_sac_")]
    yield from _needs(c, "mode", (*_RECOMPUTING, "memory_budget"), "scope")
    yield from _needs(
        c, "mode", _RECOMPUTING, "preserve_rng_state", "determinism_check", "early_stop", "debug"
    )
    yield from _needs(c, "mode", ("memory_budget",), "memory_budget", "visualize_memory_budget_pareto")
    yield from _needs(c, "mode", ("selective",), *per_operator)
    yield from _needs(c, "selective_ac_option", ("op",), *per_operator)
    if _get(c, shapes) and c.per_op_sac_matmuls == "none":
        yield (
            shapes,
            'it makes exceptions from what per_op_sac_matmuls keeps, which is "none": leave one of the two out',
        )
    kept = (c.per_op_sac_keep_attention, c.per_op_sac_keep_collectives, c.per_op_sac_keep_operators)
    if c.per_op_sac_matmuls == "none" and not any(kept):
        yield "per_op_sac_matmuls", "nothing else is kept, either: take mode full, or say what to keep"


def _compile(c: Any) -> Refusals:
    if c.enable and not c.components:
        yield "components", 'nothing is compiled so: name "model", "loss" or "optimizer"'
    if len(set(c.components)) < len(c.components):
        yield "components", "one is named twice: once is enough"
    if c.enable and c.fullgraph and "optimizer" in c.components:
        yield (
            "fullgraph",
            'an optimizer\'s step is several graphs: leave fullgraph out, or "optimizer" out of components',
        )
    if c.enable and c.mode is not None and c.options is not None:
        yield "options", "compile.mode and compile.options exclude each other: leave one of the two out"


def _loss(c: Any) -> Refusals:
    yield from _needs(c, "fused", (True, None), "chunk_tokens")


OF_MUON = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
OF_ADAM = ("beta1", "beta2", "eps")
"""Keys of [optimizer] and of its groups that one kind of optimizer reads."""


def _optimizer_group(g: Any) -> Refusals:
    given = [name for name in _fields(type(g)) if name != "pattern" and getattr(g, name) is not None]
    if not given:
        yield (
            "pattern",
            "the group has no other key, so it changes nothing: give it another, such as lr, or leave it out",
        )
    for name in OF_ADAM if g.name == "Muon" else OF_MUON if g.name is not None else ():
        if name in given:
            yield name, f'name = "{g.name}" does not read it: leave one of the two out'


def _optimizer(o: Any) -> Refusals:
    muon = o.name == "Muon" or any(group.name == "Muon" for group in o.groups)
    if not muon:
        yield from _needs(o, "name", ("Muon",), *OF_MUON)
    if muon and o.implementation == "fused_opt_states_bf16":
        yield "implementation", 'Muon keeps its momentum in the type of the parameters: take "fused"'


def _float8(c: Any) -> Refusals:
    # A filter alone stands in jobs of torchtitan, which has another switch.
    gather, scales = "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"
    yield from _needs(c, "recipe_name", _RECIPES, "filter_unaligned", "emulate", gather, scales)
    if c.enable_fsdp_float8_all_gather and c.recipe_name != "tensorwise":
        yield (
            gather,
            f'a weight that is gathered in float8 has one scale, and recipe_name = "{c.recipe_name}" has one a row: '
            "take tensorwise, or gather in high precision",
        )
    yield from _needs(c, gather, (True,), scales)


def _lora(c: Any) -> Refusals:
    names = ("alpha", "dropout", "quantize_base", "target_modules", "exclude_modules", "modules_to_save")
    if c.rank is None:
        for name in names:
            if _get(c, name) != _default(c, name):
                yield (
                    name,
                    "it does nothing without lora.rank, which switches adapters on: set that, or leave this out",
                )


# ---------------------------------------------------------------- a strategy


def _shared(c: Any) -> Refusals:
    # In a job, `strategy_of` leaves these out: [compile] enable and recipe_name are switches that the others wait for.
    switched = [f"compile.{name}" for name in ("backend", "mode", "fullgraph", "dynamic", "options")]
    yield from _needs(c, "compile.enable", (True,), *switched)
    yield from _needs(c, "compile.backend", ("inductor",), "compile.mode", "compile.options")
    yield from _needs(c, "float8.recipe_name", _RECIPES, "float8.filter_fqns")
    if c.lora.quantize_base is not None and c.float8.recipe_name is not None:
        yield (
            "lora.quantize_base",
            "float8 quantises the same weights (float8.recipe_name): leave one of the two out",
        )
    mode = c.activation_checkpoint.mode
    if c.lora.dropout > 0 and mode != "none" and not c.activation_checkpoint.preserve_rng_state:
        yield (
            "activation_checkpoint.preserve_rng_state",
            f"what is computed again would draw other numbers for lora.dropout = {c.lora.dropout}: set it to true, or the "
            "dropout to 0",
        )
    if mode == "memory_budget" and not c.compile.blocks:
        yield "activation_checkpoint.mode", f"the compiler chooses, and {_NOT_COMPILED}"
    if mode == "keep_mixer" and c.compile.blocks:
        yield (
            "activation_checkpoint.mode",
            "a kept mixer can't be in a compiled block: set compile.enable to false, or take mlp",
        )


def _fsdp2_config(c: Any) -> Refusals:
    yield from _shared(c)
    yield from _needs(c, "enable_cpu_offload", (True,), "pin_cpu_memory")
    yield from _needs(c, "mixed_precision_param", ("bfloat16", "float32"), "mixed_precision_cast_inputs")
    yield from _needs(c, "enable_async_tensor_parallel", (True,), "async_tensor_parallel_unfused")
    if c.fsdp_backward_prefetch and c.fsdp_reshard_after_forward in ("never", 1):
        yield (
            "fsdp_backward_prefetch",
            f"with fsdp_reshard_after_forward = {c.fsdp_reshard_after_forward!r} the backward gathers nothing: set one "
            "of them to its default",
        )
    if c.autocast_dtype and c.mixed_precision_param not in (None, "float32", c.autocast_dtype):
        yield (
            "autocast_dtype",
            f'mixed_precision_param = "{c.mixed_precision_param}" already casts what it computes: leave one of the two out',
        )
    if c.enable_fsdp_symm_mem and c.float8.enable_fsdp_float8_all_gather:
        yield (
            "enable_fsdp_symm_mem",
            "it has an all-gather of its own, and so has enable_fsdp_float8_all_gather: leave one of them out",
        )
    yield from _async_tensor_parallel("enable_async_tensor_parallel", c, c.compile)


def _async_tensor_parallel(option: str, config: Any, compiled: Any, **more: bool) -> Refusals:
    needs = {
        "enable_sequence_parallel = true": config.enable_sequence_parallel,
        'compile.enable = true with "model" in compile.components': compiled.blocks,
        'compile.backend = "inductor"': compiled.backend == "inductor",
    }
    missing = [need for need, held in (needs | more).items() if not held]
    if config.enable_async_tensor_parallel and missing:
        yield option, f"it needs {' and '.join(missing)}"


def _ddp_config(c: Any) -> Refusals:
    if c.bucket_cap_mb is not None and c.bucket_cap_mb * 2**20 < 1:
        yield "bucket_cap_mb", "MiB of gradients in one all-reduce, a byte at least; torch's default is 25"
    if c.static_graph and c.find_unused_parameters:
        yield (
            "static_graph",
            "the first step shows which parameters are unused: set find_unused_parameters to false",
        )
    if c.static_graph and c.defer_grad_sync:
        yield (
            "static_graph",
            "torch then can't defer sums of gradients (pytorch #143580): set defer_grad_sync to false",
        )
    if c.split_compiled_blocks and c.bucket_cap_mb is not None and c.bucket_cap_mb < 1:
        yield "bucket_cap_mb", "split_compiled_blocks needs at least 1, which is torch's first bucket"
    yield from _shared(c)
    if c.split_compiled_blocks and not c.compile.blocks:
        yield "split_compiled_blocks", _NOT_COMPILED
    if c.float8.enable_fsdp_float8_all_gather:
        yield (
            "float8.enable_fsdp_float8_all_gather",
            "DDP gathers no weights: take fsdp2, or leave it out",
        )


# ---------------------------------------------------------------- a job


def schedule_steps(job: Any) -> int:
    """Return the length of the learning-rate schedule: the run's, but never shorter than its warm-up."""
    return job.lr_scheduler.total_steps or max(job.training.steps, job.lr_scheduler.warmup_steps)


def _job(job: Any) -> Refusals:
    yield from _job_parallelism(job)
    yield from _job_batches(job)
    yield from _job_schedule(job)
    yield from _job_files(job)
    yield from _needs(job, "debug.deterministic", (True,), "debug.deterministic_warn_only")


def _job_parallelism(job: Any) -> Refusals:
    from titanplans.config.sections.parallelism import DDP, FSDP2, MixedPrecision, Offload

    p, strategy = job.parallelism, "parallelism.data_parallel_strategy"
    for key in ("parallelism.pipeline_parallel_degree", "parallelism.context_parallel_degree"):
        if _get(job, key) != 1:
            yield key, REFUSED[key].reason
    if p.data_parallel_strategy == "megatron_fsdp":
        yield (
            strategy,
            "it is not supported in a job: torchtitan's trainer initialises and saves models in ways that its wrapper has "
            'not: take "fsdp2", or in a loop of your own ParallelManager(MegatronFSDPConfig())',
        )
    # Options that a strategy does not have. Under DDP, mixed_precision_param is autocast.
    yield from _needs(job, strategy, ("ddp",), *(f"ddp.{name}" for name in _fields(DDP)))
    fsdp2 = [
        f"training.{name}" for name in _fields(Offload, MixedPrecision) if name != "mixed_precision_param"
    ]
    fsdp2 += [f"parallelism.{name}" for name in (*_fields(FSDP2), "tensor_parallel_degree")]
    yield from _needs(job, strategy, ("fsdp2",), *fsdp2, "validation.unshard")
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
        yield "model.plan", f"parallelism.{_NOTHING_IS_SPLIT}"
    # A length that is no multiple: the last shard is padded, and in each block padding stands before each product.
    multiple = f"training.seq_len = {length} to be a multiple of tensor_parallel_degree = {degree}"
    splits = {"tensor_parallel_degree above 1": degree > 1, multiple: length % degree == 0}
    yield from _async_tensor_parallel("parallelism.enable_async_tensor_parallel", p, job.compile, **splits)


def _job_batches(job: Any) -> Refusals:
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
    yield from _needs(
        job, "training.chat.enable", (True,), *(f"training.chat.{name}" for name in _fields(type(t.chat)))
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
            if _get(job, f"{loader}.{key}") and _get(job, f"{loader}.num_workers") == 0:
                yield f"{loader}.{key}", f"it needs workers: set {loader}.num_workers above 0"


def _job_schedule(job: Any) -> Refusals:
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


def _job_files(job: Any) -> Refusals:
    yield from _needs(job, "training.skip_nan_inf", (True,), "training.skip_nan_inf_limit")
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
    yield from _needs(job, "checkpoint.enable", (True,), *(f"checkpoint.{key}" for key in loading))
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


REFUSALS: dict[str, Callable[[Any], Refusals]] = {
    "ActivationCheckpoint": _activation_checkpoint,
    "Compile": _compile,
    "Loss": _loss,
    "Optimizer": _optimizer,
    "OptimizerGroup": _optimizer_group,
    "Float8": _float8,
    "LoRA": _lora,
    "FSDP2Config": _fsdp2_config,
    "DDPConfig": _ddp_config,
    "JobConfig": _job,
}
"""By the class whose options are read."""

# ---------------------------------------------------------------- a strategy on a mesh, for a model


@dataclass(frozen=True)
class Placement:
    """A strategy, and what it meets. Not a group of options."""

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


def check_placement(placement: Placement) -> None:
    """Refuse a strategy that can't be honoured on its mesh, on its device or for its model.

    Raises:
        OptionError: the first option that is refused.
    """
    refusals = [_placement_float8, _placement_compile]
    if placement.config.title == "fsdp2":
        refusals.insert(0, _placement_fsdp2)
    for refuse in refusals:
        for option, why in refuse(placement):
            raise placement.config.error(option, why)


def _placement_fsdp2(p: Placement) -> Refusals:
    c = p.config
    if c.plan is not None and p.tp == 1:
        yield "plan", _NOTHING_IS_SPLIT
    if c.fsdp_defer_grad_sync == "replicas" and p.dp_replicate == 1:
        yield (
            "fsdp_defer_grad_sync",
            "there is one copy of the model (data_parallel_replicate_degree = 1), and no sum over copies to wait with: set "
            "it to all or nothing, or data_parallel_replicate_degree above 1",
        )
    if c.enable_fsdp_symm_mem and p.device_type != "cuda":
        yield "enable_fsdp_symm_mem", f"it needs CUDA, and this mesh is on {p.device_type}: leave it out"
    if c.enable_async_tensor_parallel and (p.tp == 1 or not p.nccl):
        missing = "tensor_parallel_degree above 1" if p.tp == 1 else "CUDA with NCCL"
        yield "enable_async_tensor_parallel", f"it needs {missing}: add what is missing, or leave it out"


def _placement_float8(p: Placement) -> Refusals:
    gather = "float8.enable_fsdp_float8_all_gather"
    if _get(p.config, gather):  # which DDP has not
        if p.dp_shard == 1:
            yield gather, "data_parallel_shard_degree = 1 gathers nothing: raise it, or leave this out"
        if p.config.fsdp_reshard_after_forward not in ("default", "always", "never", 1):
            yield (
                "fsdp_reshard_after_forward",
                "FSDP2 can't gather float8 from the ranks of a smaller group (enable_fsdp_float8_all_gather): take "
                "default, always or never, or gather in high precision",
            )
        if p.tp > 1 and not p.config.float8.precompute_float8_dynamic_scale_for_fsdp:
            yield (
                gather,
                "with tensor parallelism each gather would seek the scale of one rank's share, not of the weight: set "
                "precompute_float8_dynamic_scale_for_fsdp to true, or leave this out",
            )
    if p.config.autocast_dtype == "float32" and p.device_type == "cpu":
        yield (
            "autocast_dtype",
            "on a CPU torch's autocast takes bfloat16 alone, and does nothing otherwise: leave it out",
        )


def _placement_compile(p: Placement) -> Refusals:
    compiled, ac = p.config.compile, p.config.activation_checkpoint
    on_cpu = p.device_type == "cpu"
    if compiled.enable and on_cpu and compiled.mode not in (None, "default"):
        yield (
            "compile.mode",
            "it changes nothing on a CPU, where inductor captures no CUDA graphs and tunes no product of a model in "
            "training: leave it out, or run on a GPU",
        )
    if compiled.enable and on_cpu and compiled.backend == "cudagraphs":
        yield "compile.backend", "it needs a GPU: take inductor on a CPU"
    others = ("triton.", "cuda.", "cutlass.", "rocm.") if on_cpu else ("cpp.",)
    foreign = next((key for key in compiled.options or () if key.startswith(others)), None)
    if compiled.enable and foreign:
        yield (
            "compile.options",
            f"inductor does not read {foreign!r} on device type {p.device_type!r}: leave it out",
        )
    if compiled.blocks and compiled.fullgraph and not p.one_graph:
        yield (
            "compile.fullgraph",
            "blocks hold modules of flash-linear-attention, whose kernels take themselves out of every graph: leave it out",
        )
    keeps_operators = ac.mode == "selective" and ac.selective_ac_option == "op"
    if compiled.blocks and not p.one_graph and keeps_operators:
        yield (
            "activation_checkpoint.mode",
            "compiled blocks that hold modules of flash-linear-attention are several graphs, in which no operator can be "
            'kept: take full, selective with selective_ac_option = "2", mlp or memory_budget, or set compile.enable to '
            "false",
        )
    # Attention, which the compiler takes for a random operator, lies in what is recomputed.
    keeps_attention = ac.per_op_sac_keep_attention if keeps_operators else ac.mode not in _WITH_ATTENTION
    if compiled.blocks and p.one_graph and p.tp > 1 and not keeps_attention:
        yield (
            "activation_checkpoint.mode",
            f"that computes attention again fails with compile and tensor_parallel_degree = {p.tp} in torch 2.13 where a "
            "block is one graph: its partitioner counts the random state of attention behind the device mesh; keep "
            'attention\'s output (selective_ac_option = "op", mlp or memory_budget), or set compile.enable to false',
        )
