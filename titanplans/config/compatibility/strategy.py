"""Contradictions within a strategy: its own options, and those of its groups."""

from typing import Any

from titanplans.config.compatibility.groups import RECIPES
from titanplans.config.compatibility.words import needs
from titanplans.config.options import Refusals

NOTHING_IS_SPLIT = "tensor_parallel_degree = 1 splits nothing; raise it or remove the plan"
NO_CAPACITY = "with expert_parallel_degree = 1 no row is sent to an expert; raise it or remove this key"
_NOT_COMPILED = 'no block is compiled; set compile.enable = true with "model" in compile.components'


def no_float8(context: int) -> str:
    """Say why context parallelism of that degree and float8 exclude each other."""
    return (
        f"with context_parallel_degree = {context} a process has its own tokens, and float8's scales are those of all; "
        "leave float8 out, or set context_parallel_degree = 1"
    )


def _shared(c: Any) -> Refusals:
    # In a job, `strategy_of` leaves these out: [compile] enable and recipe_name are switches that the others wait for.
    switched = [f"compile.{name}" for name in ("backend", "mode", "fullgraph", "dynamic", "options")]
    yield from needs(c, "compile.enable", (True,), *switched)
    yield from needs(c, "compile.backend", ("inductor",), "compile.mode", "compile.options")
    yield from needs(c, "float8.recipe_name", RECIPES, "float8.filter_fqns")
    if c.lora.quantize_base is not None and c.float8.recipe_name is not None:
        yield ("lora.quantize_base", "float8.recipe_name quantises the same weights; keep one of them")
    mode = c.activation_checkpoint.mode
    if c.lora.dropout > 0 and mode != "none" and not c.activation_checkpoint.preserve_rng_state:
        yield (
            "activation_checkpoint.preserve_rng_state",
            f"recomputation would draw another mask for lora.dropout = {c.lora.dropout}; set preserve_rng_state = true, or "
            "the dropout to 0",
        )
    if mode == "memory_budget" and not c.compile.blocks:
        yield "activation_checkpoint.mode", f"the compiler decides, but {_NOT_COMPILED}"
    if mode == "keep_mixer" and c.compile.blocks:
        yield (
            "activation_checkpoint.mode",
            "a compiled block can't keep its mixer's output; set compile.enable = false, or use mlp",
        )


def fsdp2(c: Any) -> Refusals:
    """Yield the contradictions within the options of FSDP2 and their groups."""
    yield from _shared(c)
    yield from needs(c, "enable_cpu_offload", (True,), "pin_cpu_memory")
    yield from needs(c, "mixed_precision_param", ("bfloat16", "float32"), "mixed_precision_cast_inputs")
    yield from needs(c, "enable_async_tensor_parallel", (True,), "async_tensor_parallel_unfused")
    if c.fsdp_backward_prefetch and c.fsdp_reshard_after_forward in ("never", 1):
        yield (
            "fsdp_backward_prefetch",
            f"with fsdp_reshard_after_forward = {c.fsdp_reshard_after_forward!r} the backward gathers nothing; reset one "
            "of them to its default",
        )
    if c.autocast_dtype and c.mixed_precision_param not in (None, "float32", c.autocast_dtype):
        yield (
            "autocast_dtype",
            f'mixed_precision_param = "{c.mixed_precision_param}" already casts the computation; keep one of them',
        )
    if c.enable_fsdp_symm_mem and c.float8.enable_fsdp_float8_all_gather:
        yield (
            "enable_fsdp_symm_mem",
            "it replaces the all-gather, as enable_fsdp_float8_all_gather does; keep one of them",
        )
    yield from async_tensor_parallel("enable_async_tensor_parallel", c, c.compile)


def async_tensor_parallel(option: str, config: Any, compiled: Any, **more: bool) -> Refusals:
    """Yield `option` if async tensor parallelism is on and lacks a requirement; `more` are requirements of the caller."""
    wanted = {
        "enable_sequence_parallel = true": config.enable_sequence_parallel,
        'compile.enable = true with "model" in compile.components': compiled.blocks,
        'compile.backend = "inductor"': compiled.backend == "inductor",
    }
    missing = [need for need, held in (wanted | more).items() if not held]
    if config.enable_async_tensor_parallel and missing:
        yield option, f"it needs {' and '.join(missing)}"


def ddp(c: Any) -> Refusals:
    """Yield the contradictions within the options of DDP and their groups."""
    if c.bucket_cap_mb is not None and c.bucket_cap_mb * 2**20 < 1:
        yield "bucket_cap_mb", "a bucket holds less than one byte; raise it (torch's default is 25)"
    if c.static_graph and c.find_unused_parameters:
        yield (
            "static_graph",
            "the first step already shows unused parameters; set find_unused_parameters = false",
        )
    if c.static_graph and c.defer_grad_sync:
        yield (
            "static_graph",
            "a static graph can't defer gradient sums (pytorch #143580); set defer_grad_sync = false",
        )
    if c.split_compiled_blocks and c.bucket_cap_mb is not None and c.bucket_cap_mb < 1:
        yield "bucket_cap_mb", "split_compiled_blocks needs at least 1, the size of torch's first bucket"
    yield from _shared(c)
    if c.split_compiled_blocks and not c.compile.blocks:
        yield "split_compiled_blocks", _NOT_COMPILED
    if c.float8.enable_fsdp_float8_all_gather:
        yield ("float8.enable_fsdp_float8_all_gather", "DDP gathers no weights; use fsdp2 or remove this key")
