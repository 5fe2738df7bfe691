"""Which options exclude each other, or the model: every refusal here comes before any weight moves.

Each check names the two options and which to change. What one option alone can't be is refused where it
is made (`strategies`); what a plan can't do to a model is `plans`' own to say. Which combinations are
left, and that they train, is in docs/combinations.md, which the tests write.
"""

from typing import Any

from torch import nn

from titanplans.errors import ParallelError
from titanplans.parallel.activation_checkpoint import Full, MemoryBudget, MLPOnly
from titanplans.parallel.activation_checkpoint.keep_mixer import KeepMixer
from titanplans.parallel.activation_checkpoint.selective import Selective
from titanplans.parallel.compile import async_tp, check_fullgraph, one_graph_a_block
from titanplans.parallel.compile.limits import check_device
from titanplans.parallel.ddp import refuse_degrees
from titanplans.parallel.degrees import refuse_unsupported
from titanplans.parallel.float8 import check_float8_options
from titanplans.parallel.fsdp import check_shard
from titanplans.parallel.fsdp.policies import shard_size
from titanplans.parallel.strategies import DDPConfig, FSDP2Config


def refuse(model: nn.Module, mesh: Any, config: FSDP2Config | DDPConfig, policy: Any) -> None:
    """Refuse what can't be honoured of `config` together, for `model` on `mesh`.

    Args:
        model: not yet touched.
        mesh: a `Mesh`, or torchtitan's ParallelDims.
        config: the options.
        policy: what recomputes, or None; in place of `config.activation_checkpointing`.

    Raises:
        ParallelError: two options exclude each other, or one the model.
        PlanError: `model` has no list of blocks.
    """
    if isinstance(config, FSDP2Config):
        refuse_unsupported(mesh)
        _refuse_without_tp(mesh, config)
        _refuse_replicas(mesh, config)
        check_shard(model, fsdp_mesh(mesh), **config.shard_options())
    else:
        refuse_degrees(mesh)
    _refuse_float8(mesh, config)
    if policy is not None and hasattr(policy, "check"):
        policy.check(model)
    _refuse_recomputation(policy, config.compile.blocks)
    if config.autocast_dtype == "float32" and fsdp_mesh(mesh).device_type == "cpu":
        raise config.refuse(
            "autocast_dtype",
            "on a CPU torch's autocast takes bfloat16 alone, and does nothing otherwise: leave it out",
        )
    if config.compile.enable:
        check_device(config.compile, fsdp_mesh(mesh).device_type)
    if config.compile.blocks:
        _refuse_compiled(model, mesh, config, policy)


def fsdp_mesh(mesh: Any) -> Any:
    """Return the mesh that FSDP shards over: 1-D, or 2-D where there are copies (HSDP)."""
    return mesh.get_mesh(["dp_replicate", "fsdp"] if mesh.dp_replicate_enabled else ["fsdp"])


def _refuse_without_tp(mesh: Any, config: FSDP2Config) -> None:
    if mesh.tp_enabled:
        return
    if config.tp_plan is not None:
        raise ParallelError(
            "a plan is given, but tensor_parallel_degree = 1 splits nothing: raise it, or leave it out"
        )


def _refuse_replicas(mesh: Any, config: FSDP2Config) -> None:
    if config.defer_fsdp_grad_sync == "replicas" and not mesh.dp_replicate_enabled:
        raise config.refuse(
            "defer_fsdp_grad_sync",
            "there is one copy of the model (dp_replicate = 1), and no sum over copies to wait with: set it to all "
            "or nothing, or dp_replicate above 1",
        )


def _refuse_float8(mesh: Any, config: FSDP2Config | DDPConfig) -> None:
    float8 = config.float8
    if float8.recipe is None:
        return
    over = fsdp_mesh(mesh)
    check_float8_options(float8.recipe, float8.emulate, over.device_type)
    if not float8.fsdp_all_gather:
        return
    if shard_size(over) == 1:
        raise float8.refuse("fsdp_all_gather", "dp_shard = 1 gathers nothing: raise it, or leave this out")
    reshard = config.reshard_after_forward if isinstance(config, FSDP2Config) else "default"
    if type(reshard) is int and reshard > 1:
        raise config.refuse(
            "reshard_after_forward",
            "FSDP2 can't gather float8 from the ranks of a smaller group (float8.fsdp_all_gather): take default, always or "
            "never, or gather in high precision",
        )
    if mesh.tp_enabled and not float8.precompute_scales:
        raise float8.refuse(
            "fsdp_all_gather",
            "with tensor parallelism needs precompute_scales: each gather would seek the scale of one rank's share, "
            "not of the weight; set precompute_scales to true, or leave this out",
        )


def _refuse_recomputation(policy: Any, compiles: bool) -> None:
    """Refuse what `strategies` refuses by name, of a policy that was made by hand."""
    if isinstance(policy, MemoryBudget) and not compiles:
        raise ParallelError(
            "a memory budget is the compiler's to keep, and no block is compiled: compile the model, or take Selective"
        )
    if isinstance(policy, KeepMixer) and compiles:
        raise ParallelError(
            "a mixer that is kept from recomputation can't be in a compiled block: switch compile off, or take MLPOnly"
        )


def _refuse_compiled(model: nn.Module, mesh: Any, config: FSDP2Config | DDPConfig, policy: Any) -> None:
    one_graph = one_graph_a_block(model)
    check_fullgraph(model, config.compile.fullgraph)
    if config.compile.enable_async_tensor_parallel:
        assert isinstance(config, FSDP2Config)
        async_tp.refuse(mesh=mesh, sequence_parallel=config.sequence_parallel)
    if not one_graph and policy is not None and not _bears_several_graphs(policy):
        raise ParallelError(
            f"compile, and activation checkpointing by {type(policy).__name__} of blocks that hold modules of "
            "flash-linear-attention: such a block is several graphs, in which no operator can be kept; take full, every "
            "n-th block, mlp or a memory budget, or switch compile off"
        )
    if mesh.tp_enabled and one_graph and _recomputes_attention(policy):
        raise ParallelError(
            f"compile, tensor_parallel_degree = {mesh.tp} and activation checkpointing that computes attention again "
            f"({type(policy).__name__}) fail together in torch 2.13 where a block is one graph: its partitioner counts "
            "the random state of attention behind the device mesh; keep attention's output (selective by operator, mlp "
            "or a memory budget), or switch compile off"
        )


def _bears_several_graphs(policy: Any) -> bool:
    """Whether `policy` recomputes modules whole; torchtitan's own are not known to."""
    return isinstance(policy, (Full, MemoryBudget)) and not isinstance(policy, Selective)


def _recomputes_attention(policy: Any) -> bool:
    """Whether attention, which the compiler takes for a random operator, lies in what `policy` recomputes."""
    if policy is None or isinstance(policy, (MLPOnly, MemoryBudget)):
        return False
    if isinstance(policy, Selective):
        return not policy.attention
    return True
