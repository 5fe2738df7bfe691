"""The order in which a model becomes a parallel one: each step is a named function in a file of its own.

Here is only what comes after what, and why. `parallelize` (torchtitan's convention) and `ParallelManager`
(for a loop of one's own) both end here.
"""

import logging
from collections import Counter
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanplans.parallel import interplay
from titanplans.parallel.activation_checkpoint import apply_activation_checkpointing
from titanplans.parallel.autocast import apply_autocast
from titanplans.parallel.compile import apply_compile
from titanplans.parallel.ddp import apply_ddp, refuse_degrees, refuse_model
from titanplans.parallel.float8 import (
    Conversion,
    check_calls,
    convert_to_float8,
    keep_plain_between_graphs,
    refuse_read_weights,
)
from titanplans.parallel.float8.all_gather import gather_in_float8
from titanplans.parallel.float8.scales import seek_scales_together
from titanplans.parallel.fsdp import shard
from titanplans.parallel.steps import took
from titanplans.parallel.strategies import DDPConfig, Float8, FSDP2Config
from titanplans.parallel.strategies.sections import dtype
from titanplans.tensor_parallel import apply_plan

_log = logging.getLogger(__name__)


def apply_strategy(
    model: nn.Module,
    mesh: Any,
    config: FSDP2Config | DDPConfig,
    *,
    policy: Any = None,
    dump_folder: str = "",
) -> None:
    """Parallelise `model` in place, by every step of `config`.

    Args:
        model: a causal language model; under FSDP2 normally on meta, under DDP with its values. See
            `apply_to_blocks` for the steps that also a model on meta takes under DDP.
        mesh: a `Mesh`, or torchtitan's ParallelDims.
        config: the options.
        policy: what recomputes, in place of `config.activation_checkpointing`.
        dump_folder: folder for what a policy writes.

    Raises:
        PlanError: the plan does not fit the model or the degree.
        ParallelError: an option can't be honoured. Both before any weight moves.
    """
    if isinstance(config, DDPConfig):
        refuse_degrees(mesh)
        refuse_model(model, _ddp_mesh(mesh))
    apply_to_blocks(model, mesh, config, policy=policy, dump_folder=dump_folder)
    apply_data_parallelism(model, mesh, config)


def apply_to_blocks(
    model: nn.Module,
    mesh: Any,
    config: FSDP2Config | DDPConfig,
    *,
    policy: Any = None,
    dump_folder: str = "",
) -> None:
    """Take every step but data parallelism; arguments and errors are those of `apply_strategy`."""
    if policy is None:
        policy = config.activation_checkpointing.policy()
    interplay.refuse(model, mesh, config, policy)

    # First: a plan splits the products that there are, and FSDP gathers their weights.
    if config.float8.recipe is not None:
        done = convert(model, config.float8, interplay.fsdp_mesh(mesh).device_type)
        _log.info(_words(done))
        if config.compile.blocks:
            refuse_read_weights(model)
            keep_plain_between_graphs(model)
        else:
            check_calls(model)
        took(model, "float8", recipe=done.recipe)

    # Before anything wraps a module: a plan names modules as the model has them, and shards whole parameters.
    if isinstance(config, FSDP2Config) and mesh.tp_enabled:
        applied = apply_plan(
            model,
            mesh.get_mesh("tp"),
            loss_parallel=config.loss_parallel,
            sequence_parallel=config.sequence_parallel,
            plan=config.tp_plan,
        )
        counts = Counter(type(style).__name__ for style in applied.styles.values())
        _log.info(f"Tensor parallel {mesh.tp}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
        took(model, "tensor parallelism", styles=dict(counts))

    # Before compile, so that the compiler sees what is recomputed.
    if policy is not None:
        apply_activation_checkpointing(model, policy, dump_folder)
        took(model, "activation checkpointing", policy=str(policy))

    # Before data parallelism, whose hooks on blocks and parameters stay outside the compiled graphs.
    if config.compile.blocks:
        apply_compile(model, config.compile, mesh)
        took(model, "compile")


def apply_data_parallelism(model: nn.Module, mesh: Any, config: FSDP2Config | DDPConfig) -> None:
    """Take the last step: FSDP2 at every size (over one rank it still gives mixed precision), or DDP."""
    if isinstance(config, DDPConfig):
        apply_ddp(model, _ddp_mesh(mesh), config)
        took(model, "DDP")
        return
    over = interplay.fsdp_mesh(mesh)
    if (autocast := dtype(config.autocast_dtype)) is not None:
        apply_autocast(model, over.device_type, autocast)
        took(model, "autocast", dtype=config.autocast_dtype)
    shard(model, over, **config.shard_options())
    if config.float8.fsdp_all_gather:
        gather_in_float8(model)
    split = mesh.tp_enabled and not config.float8.fsdp_all_gather
    if config.float8.precompute_scales or (split and config.float8.recipe == "tensorwise"):
        seek_scales_together(model, dtype(config.mixed_precision.param_dtype))
    took(model, "FSDP2")


def convert(model: nn.Module, options: Float8, device_type: str) -> Conversion:
    """Convert `model` to float8 as `options` say; see `convert_to_float8`."""
    assert options.recipe is not None
    return convert_to_float8(
        model,
        options.recipe,
        filters=options.filter_fqns,
        filter_unaligned=options.filter_unaligned,
        emulate=options.emulate,
        fsdp_all_gather=options.fsdp_all_gather,
        device_type=device_type,
    )


def _words(done: Conversion) -> str:
    how = ", emulated" if done.emulate else ""
    return f"Float8 {done.recipe}{how}: {len(done.converted)} Linear modules, {len(done.filtered)} left out"


def _ddp_mesh(mesh: Any) -> DeviceMesh:
    return mesh.get_mesh("batch" if mesh.dp_enabled else "fsdp")
