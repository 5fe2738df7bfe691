"""`parallelize`: how a model becomes a parallel one, top-down: float8, tensor parallelism, recomputation, compile, data
parallelism. The one door: torchtitan's trainer and `ParallelManager` come through here, too.

Each step is a named function in a file of its own. Here is what comes after what, and why.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanplans.adapters.add import add_adapters, check_before_compile, freeze
from titanplans.apply.apply import apply_plan
from titanplans.config import ActivationCheckpoint, Compile, DDPConfig, FSDP2Config
from titanplans.config.compatibility.placement import Placement, check_placement
from titanplans.config.options import Options, options_of
from titanplans.config.values import show
from titanplans.errors import ParallelError
from titanplans.parallel.activation_checkpoint import (
    apply_activation_checkpointing,
    check_activation_checkpointing,
)
from titanplans.parallel.compile import apply_compile, compile_options, one_graph_a_block
from titanplans.parallel.compile.async_tp import has_nccl
from titanplans.parallel.ddp import apply_ddp, refuse_model
from titanplans.parallel.fsdp import check_shard, shard
from titanplans.parallel.mesh.degrees import refuse_degrees
from titanplans.parallel.optimizers.roles import find_roles
from titanplans.parallel.record import record_of
from titanplans.plan.custom import PlanSource
from titanplans.precision.autocast import apply_autocast
from titanplans.precision.float8.all_gather import gather_in_float8
from titanplans.precision.float8.conversion import (
    Conversion,
    check_calls,
    check_float8_options,
    convert_to_float8,
    keep_plain_between_graphs,
    refuse_read_weights,
)
from titanplans.precision.float8.scales import seek_scales_together
from titanplans.split.parameters.replaced import replacing

_log = logging.getLogger(__name__)

Config = FSDP2Config | DDPConfig

_TORCHTITANS = ActivationCheckpoint(
    mode="selective", selective_ac_option="op", per_op_sac_keep_attention=False
)
"""Stands for a policy of torchtitan's where contradictions are looked up: it may recompute attention, and keep operators."""


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    config: Config | None = None,
    training: Any = None,
    parallelism: Any = None,
    compile_config: Any = None,
    ac_config: Any = None,
    dump_folder: str = "",
    plan: PlanSource = None,
    loss_parallel: bool = True,
) -> nn.Module:
    """Parallelise `model` in place and return it; torchtitan's `parallelize_fn` convention.

    The options come from `config`, or, where a caller has torchtitan's own, from its sections, which are read by the names
    that their fields and ours have in common.

    Args:
        model: a causal language model (token ids [batch, sequence] in, logits out), normally on meta. Under DDP a model
            on meta takes every step but the last: call `apply_data_parallelism` once it has values.
        parallel_dims: torchtitan's ParallelDims, or a `Mesh`: the degrees, and the meshes "tp" and "fsdp" (with
            "dp_replicate").
        config: the options; instead of the four sections.
        training, parallelism, compile_config: torchtitan's sections of these names.
        ac_config: what to recompute: an `ActivationCheckpoint`, a torchtitan ActivationCheckpointing.Config, or None for
            what `config` says.
        dump_folder: folder for what a step writes.
        plan: beside torchtitan's sections, a plan of the user's own; None for the registered one. See `apply_plan`.
        loss_parallel: beside torchtitan's sections: keep the logits sharded over the vocabulary (a DTensor, `Shard(-1)`).

    Raises:
        PlanError: the plan does not fit the model or the degree.
        OptionError: an option can't be honoured; the error has its name.
        ParallelError: the mesh or the model can't be had so. All before any weight moves.
    """
    sections = [section for section in (training, parallelism, compile_config) if section is not None]
    if config is not None and (sections or plan is not None or not loss_parallel):
        raise ParallelError(
            "parallelize was given config, which has the sections, the plan and loss_parallel already: give either config "
            "or those arguments"
        )
    if config is None:
        config = _from_sections(sections, compile_config, plan, loss_parallel)
    if ac_config is not None:
        ours = isinstance(ac_config, ActivationCheckpoint)
        config = replace(config, activation_checkpoint=ac_config if ours else _TORCHTITANS)
    check_compatible(model, parallel_dims, config)
    apply_steps(model, parallel_dims, config, ac_config, dump_folder)
    return model


def apply_steps(
    model: nn.Module, mesh: Any, config: Config, ac_config: Any = None, dump_folder: str = ""
) -> None:
    """Do what `parallelize` does once nothing is to be refused; the arguments are its."""
    record = record_of(model)

    # First: a plan splits the products that there are, and FSDP gathers their weights.
    if config.float8.recipe_name is not None:
        with replacing(model):
            done = convert_to_float8(model, config.float8, fsdp_mesh(mesh).device_type)
        _log.info(_words(done))
        if config.compile.blocks:
            refuse_read_weights(model)
            keep_plain_between_graphs(model)
        else:
            check_calls(model)
        record.steps.append("float8")
        record.float8 = done

    # Behind the products as they are, and before the plan, which splits adapters as it splits their weights.
    if config.lora.rank is not None:
        record.adapters = add_adapters(model, config.lora)
        record.steps.append("LoRA")
        done = record.adapters
        _log.info(
            f"LoRA of rank {config.lora.rank}: {len(done.modules)} Linear modules, {len(done.left)} left out, "
            f"{done.trained:,} of {done.trained + done.frozen:,} parameters train"
        )
    if config.compile.blocks:
        check_before_compile(model)
    if config.freeze:
        freeze(model, config.freeze, lambda why: config.error("freeze", why))
        record.steps.append("freezing")

    # Parameters lose what a model has marked on them when they are sharded, and modules their numbers when they are split.
    if record.roles is None:
        record.roles = find_roles(model, config.plan if isinstance(config, FSDP2Config) else None)

    # Before anything wraps a module: a plan names modules as the model has them, and shards whole parameters.
    if isinstance(config, FSDP2Config) and mesh.tp_enabled:
        applied = apply_plan(
            model,
            mesh.get_mesh("tp"),
            loss_parallel=not config.disable_loss_parallel,
            sequence_parallel=config.enable_sequence_parallel,
            plan=config.plan,
            dtype=dtype(config.mixed_precision_param),
        )
        counts = Counter(type(style).__name__ for style in applied.styles.values())
        _log.info(f"Tensor parallel {mesh.tp}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
        record.steps.append("tensor parallelism")
        record.plan = applied

    # Before compile, so that the compiler sees what is recomputed.
    recomputed = config.activation_checkpoint if ac_config is None else ac_config
    if config.activation_checkpoint.mode != "none":
        apply_activation_checkpointing(model, recomputed, dump_folder)
        record.steps.append("activation checkpointing")
        record.policy = _in_words(recomputed)

    # Before data parallelism, whose hooks on blocks and parameters stay outside the compiled graphs.
    if config.compile.blocks:
        async_tp = isinstance(config, FSDP2Config) and config.enable_async_tensor_parallel
        apply_compile(model, config.compile, mesh, async_tensor_parallel=async_tp)
        record.steps.append("compile")

    if isinstance(config, FSDP2Config) or not on_meta(model):
        apply_data_parallelism(model, mesh, config)


def apply_data_parallelism(model: nn.Module, mesh: Any, config: Config) -> None:
    """Take the last step: FSDP2 at every size (over one rank it still gives mixed precision), or DDP."""
    if isinstance(config, DDPConfig):
        record_of(model).replicas = _ddp_mesh(mesh)
        apply_ddp(model, _ddp_mesh(mesh), config)
        record_of(model).steps.append("DDP")
        return
    over = fsdp_mesh(mesh)
    if (autocast := dtype(config.autocast_dtype)) is not None:
        apply_autocast(model, over.device_type, autocast)
        record_of(model).steps.append("autocast")
    shard(model, over, config)
    gathers = config.float8.enable_fsdp_float8_all_gather
    if gathers:
        gather_in_float8(model)
    split = mesh.tp_enabled and not gathers and config.float8.recipe_name == "tensorwise"
    if config.float8.precompute_float8_dynamic_scale_for_fsdp or split:
        seek_scales_together(model, dtype(config.mixed_precision_param))
    record_of(model).steps.append("FSDP2")


def check_compatible(model: nn.Module, mesh: Any, config: Config) -> None:
    """Refuse what can't be honoured of `config` for `model` on `mesh`; nothing is touched.

    Raises:
        OptionError, ParallelError: as `parallelize`.
        PlanError: `model` has no list of blocks.
    """
    over = fsdp_mesh(mesh)
    refuse_degrees(mesh, ddp=isinstance(config, DDPConfig))
    if isinstance(config, DDPConfig) and not on_meta(model):
        refuse_model(model, _ddp_mesh(mesh))
    check_placement(
        Placement(
            config=config,
            tp=mesh.tp,
            dp_replicate=mesh.dp_replicate,
            dp_shard=over.size(over.ndim - 1),
            device_type=over.device_type,
            nccl=mesh.tp_enabled and has_nccl(mesh),
            one_graph=not config.compile.blocks or one_graph_a_block(model),
        )
    )
    if isinstance(config, FSDP2Config):
        check_shard(model, over, config)
    if config.float8.recipe_name is not None:
        check_float8_options(config.float8, over.device_type)
    check_activation_checkpointing(model, config.activation_checkpoint)
    if config.compile.enable:
        compile_options(config.compile)


def fsdp_mesh(mesh: Any) -> DeviceMesh:
    """Return the mesh that FSDP shards over: 1-D, or 2-D where there are copies (HSDP)."""
    return mesh.get_mesh(["dp_replicate", "fsdp"] if mesh.dp_replicate_enabled else ["fsdp"])


def _from_sections(
    sections: Sequence[Any], compile_config: Any, plan: Any, loss_parallel: bool
) -> FSDP2Config:
    given: dict[str, Any] = {"plan": plan, "disable_loss_parallel": not loss_parallel}
    for section in sections:
        given |= _common(FSDP2Config, section)
    if compile_config is not None and compile_config.enable:
        given["compile"] = Compile(**_common(Compile, compile_config))
    return FSDP2Config(**given)


def _common(cls: type[Options], section: Any) -> dict[str, Any]:
    """Return the fields that a section of torchtitan's and a group of our options have in common, but for nested groups."""
    names = [field.name for field in options_of(cls) if not isinstance(field.default, Options)]
    return {name: getattr(section, name) for name in names if hasattr(section, name)}


def dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype called `name`."""
    return None if name is None else getattr(torch, name)


def on_meta(model: nn.Module) -> bool:
    """Whether some parameter or buffer of `model` has no value yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _words(done: Conversion) -> str:
    how = ", emulated" if done.emulated else ""
    return f"Float8 {done.recipe}{how}: {len(done.converted)} Linear modules, {len(done.filtered)} left out"


def _in_words(recomputed: Any) -> str:
    """Return what is recomputed, with the options that are not their defaults."""
    if not isinstance(recomputed, ActivationCheckpoint):
        return type(recomputed).__qualname__
    given = {field.name: getattr(recomputed, field.name) for field in options_of(ActivationCheckpoint)}
    default = ActivationCheckpoint(mode=recomputed.mode)
    words = [f"{name} = {show(value)}" for name, value in given.items() if value != getattr(default, name)]
    return recomputed.mode + (f" ({', '.join(words)})" if words else "")


def _ddp_mesh(mesh: Any) -> DeviceMesh:
    return mesh.get_mesh("batch" if mesh.dp_enabled else "fsdp")
