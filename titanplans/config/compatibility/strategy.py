"""Contradictions within the options of a strategy, and between them and the mesh, device and model (`check_on_mesh`)."""

from dataclasses import dataclass
from typing import Any

from titanplans.config.compatibility.groups import RECIPES, WITH_ATTENTION, plan
from titanplans.config.options import Refusals, get, needs

NOTHING_IS_SPLIT = "tensor_parallel_degree = 1 splits nothing; raise it or remove this key"
NO_CAPACITY = "with expert_parallel_degree = 1 no tokens are sent to experts; raise it or remove this key"
_NOT_COMPILED = 'no block is compiled; set compile.enable = true with "model" in compile.components'


def no_float8(context: int) -> str:
    """Return the reason why float8 excludes context parallelism."""
    return (
        f"with context_parallel_degree = {context} a rank has only some tokens, but a float8 scale depends on all of them; "
        "remove float8, or set context_parallel_degree = 1"
    )


def _shared(c: Any) -> Refusals:
    yield from plan(c)
    # In a job these keys may be set although compile.enable or recipe_name is not: `strategy_of` then leaves them out.
    compile_keys = [f"compile.{name}" for name in ("backend", "mode", "fullgraph", "dynamic", "options")]
    yield from needs(c, "compile.enable", (True,), *compile_keys)
    yield from needs(c, "compile.backend", ("inductor",), "compile.mode", "compile.options")
    yield from needs(c, "float8.recipe_name", RECIPES, "float8.filter_fqns")
    if c.lora.quantize_base is not None and c.float8.recipe_name is not None:
        yield ("lora.quantize_base", "float8.recipe_name quantises the same weights; keep one of them")
    mode = c.activation_checkpoint.mode
    if c.lora.dropout > 0 and mode != "none" and not c.activation_checkpoint.preserve_rng_state:
        yield (
            "activation_checkpoint.preserve_rng_state",
            f"recomputation would use a different mask for lora.dropout = {c.lora.dropout}; set preserve_rng_state = true, "
            "or lora.dropout = 0",
        )
    if mode == "memory_budget" and not c.compile.blocks:
        yield (
            "activation_checkpoint.mode",
            f"the compiler chooses the activations that are kept, but {_NOT_COMPILED}",
        )
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
    """Refuse `option` if async tensor parallelism is enabled and a requirement, e.g. one of `more`, is not met."""
    requirements = {
        "enable_sequence_parallel = true": config.enable_sequence_parallel,
        'compile.enable = true with "model" in compile.components': compiled.blocks,
        'compile.backend = "inductor"': compiled.backend == "inductor",
    }
    missing = [requirement for requirement, is_met in (requirements | more).items() if not is_met]
    if config.enable_async_tensor_parallel and missing:
        yield option, f"it needs {' and '.join(missing)}"


def ddp(c: Any) -> Refusals:
    """Yield the contradictions within the options of DDP and their groups."""
    if c.bucket_cap_mb is not None and c.bucket_cap_mb * 2**20 < 1:
        yield "bucket_cap_mb", "a bucket holds less than one byte; raise it (torch's default is 25)"
    if c.static_graph and c.find_unused_parameters:
        yield (
            "static_graph",
            "with a static graph the first step finds unused parameters; set find_unused_parameters = false",
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


@dataclass(frozen=True)
class StrategyOnMesh:
    """A strategy, and the properties of its mesh, device and model that its options depend on."""

    config: Any
    """An FSDP2Config or a DDPConfig."""
    tp: int
    cp: int
    ep: int
    dp_replicate: int
    dp_shard: int
    device_type: str
    nccl: bool
    """Whether the ranks of the tensor-parallel group communicate by NCCL."""
    one_graph: bool
    """Whether each block of the model can become one graph."""


def check_on_mesh(strategy: StrategyOnMesh) -> None:
    """Check that a strategy can be honoured on its mesh and device and for its model.

    Raises:
        OptionError: names the first refused option.
    """
    refusals = [_plan, _float8, _compile]
    if strategy.config.title == "fsdp2":
        refusals.insert(1, _fsdp2)
    for refuse in refusals:
        for option, why in refuse(strategy):
            raise strategy.config.error(option, why)


def _plan(p: StrategyOnMesh) -> Refusals:
    for option in ("plan", "derive"):
        if getattr(p.config, option) not in (None, False) and p.tp == p.cp == p.ep == 1:
            yield option, NOTHING_IS_SPLIT


def _fsdp2(p: StrategyOnMesh) -> Refusals:
    c = p.config
    if c.expert_capacity_factor is not None and p.ep == 1:
        yield "expert_capacity_factor", NO_CAPACITY
    if c.fsdp_defer_grad_sync == "replicas" and p.dp_replicate == 1:
        yield (
            "fsdp_defer_grad_sync",
            "with one replica (data_parallel_replicate_degree = 1) there is no sum over replicas to defer; set it to all or "
            "nothing, or raise data_parallel_replicate_degree",
        )
    if c.enable_fsdp_symm_mem and p.device_type != "cuda":
        yield "enable_fsdp_symm_mem", f"it needs CUDA, but this mesh is on {p.device_type}; remove this key"
    if c.enable_async_tensor_parallel and (p.tp == 1 or not p.nccl):
        missing = "tensor_parallel_degree above 1" if p.tp == 1 else "CUDA with NCCL"
        yield "enable_async_tensor_parallel", f"it needs {missing}; add that or remove this key"


def _float8(p: StrategyOnMesh) -> Refusals:
    gather = "float8.enable_fsdp_float8_all_gather"
    if p.cp > 1 and p.config.float8.recipe_name is not None:
        yield "float8.recipe_name", no_float8(p.cp)
    if get(p.config, gather):  # never with DDP
        if p.dp_shard == 1:
            yield gather, "data_parallel_shard_degree = 1 gathers nothing; raise it or remove this key"
        if p.config.fsdp_reshard_after_forward not in ("default", "always", "never", 1):
            yield (
                "fsdp_reshard_after_forward",
                "FSDP2 can't gather float8 from the ranks of a smaller group (enable_fsdp_float8_all_gather); use "
                "default, always or never, or gather in high precision",
            )
        if p.tp > 1 and not p.config.float8.precompute_float8_dynamic_scale_for_fsdp:
            yield (
                gather,
                "with tensor parallelism each gather would compute the scale of a rank's shard, not of the weight; set "
                "precompute_float8_dynamic_scale_for_fsdp = true, or remove this key",
            )
    if p.config.autocast_dtype == "float32" and p.device_type == "cpu":
        yield ("autocast_dtype", "on a CPU torch.autocast supports only bfloat16; remove this key")


def _compile(p: StrategyOnMesh) -> Refusals:
    compiled, ac = p.config.compile, p.config.activation_checkpoint
    on_cpu = p.device_type == "cpu"
    if compiled.enable and on_cpu and compiled.mode not in (None, "default"):
        yield (
            "compile.mode",
            "has no effect on a CPU, where Inductor has no CUDA graphs and does not tune the matrix products of training; "
            "remove this key, or run on a GPU",
        )
    if compiled.enable and on_cpu and compiled.backend == "cudagraphs":
        yield "compile.backend", "it needs a GPU; use inductor on a CPU"
    others = ("triton.", "cuda.", "cutlass.", "rocm.") if on_cpu else ("cpp.",)
    foreign = next((key for key in compiled.options or () if key.startswith(others)), None)
    if compiled.enable and foreign:
        yield (
            "compile.options",
            f"Inductor does not use {foreign!r} on device type {p.device_type!r}; remove it",
        )
    if compiled.blocks and compiled.fullgraph and not p.one_graph:
        why = "blocks contain modules of flash-linear-attention, whose kernels break every graph"
        if p.cp > 1:
            why = f"with context_parallel_degree = {p.cp} the mixers of blocks are outside of graphs"
        if p.ep > 1:
            why = f"with expert_parallel_degree = {p.ep} experts are outside of graphs"
        yield "compile.fullgraph", f"{why}; remove this key"
    keeps_operators = ac.mode == "selective" and ac.selective_ac_option == "op"
    if compiled.blocks and not p.one_graph and keeps_operators:
        which = "with modules of flash-linear-attention"
        if p.cp > 1:
            which = f"with context_parallel_degree = {p.cp}"
        if p.ep > 1:
            which = f"with expert_parallel_degree = {p.ep}"
        yield (
            "activation_checkpoint.mode",
            f"compiled blocks {which} are several graphs, in which no operator can be "
            'kept; use full, selective with selective_ac_option = "2", mlp or memory_budget, or set compile.enable = '
            "false",
        )
    # The partitioner treats attention as a random operator, and recomputes it.
    keeps_attention = ac.per_op_sac_keep_attention if keeps_operators else ac.mode not in WITH_ATTENTION
    if compiled.blocks and p.one_graph and p.tp > 1 and not keeps_attention:
        yield (
            "activation_checkpoint.mode",
            f"recomputing attention fails in torch 2.13 with compile and tensor_parallel_degree = {p.tp} if a block is one "
            "graph, since the partitioner miscounts the random state of attention; keep attention's output "
            '(selective_ac_option = "op", mlp or memory_budget), or set compile.enable = false',
        )
