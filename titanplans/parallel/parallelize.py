"""`parallelize`: all steps that make a model parallel, with the reasons for their order.

Jobs and torchtitan's trainer call `parallelize`, pipeline jobs `parallelize_stage`, `ParallelManager` `apply_steps`.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanplans.apply.apply import choose_way, split
from titanplans.apply.check import Checked, check
from titanplans.apply.prepare import prepare
from titanplans.config import ActivationCheckpoint, Compile, DDPConfig, FSDP2Config
from titanplans.config.compatibility.strategy import StrategyOnMesh, check_on_mesh
from titanplans.config.options import Options, options_of
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
from titanplans.parallel.mesh.mesh import mesh_of_one
from titanplans.parallel.mesh.submeshes import expert_meshes, fsdp_mesh, split_meshes
from titanplans.parallel.optimizers.roles import find_roles
from titanplans.parallel.record import record_of
from titanplans.plan.custom import PlanSource, find_plan, resolve_plan
from titanplans.plan.degrees import Degrees
from titanplans.plan.options import TPOptions
from titanplans.precision.autocast import apply_autocast
from titanplans.precision.float8.all_gather import gather_in_float8
from titanplans.precision.float8.checks import check_gather
from titanplans.precision.float8.conversion import Conversion, check_float8_options
from titanplans.precision.float8.scales import compute_scales_together
from titanplans.precision.nf4 import quantised
from titanplans.split.decoder import is_present
from titanplans.split.meshes import meshes_of
from titanplans.split.stages.stage import StandInModule
from titanplans.split.stages.stages import Stages
from titanplans.text import show

_log = logging.getLogger(__name__)

Config = FSDP2Config | DDPConfig

_TORCHTITANS = ActivationCheckpoint(
    mode="selective", selective_ac_option="op", per_op_sac_keep_attention=False
)
"""Stands for any torchtitan policy in the compatibility checks, since such a policy may recompute attention and keep
operators."""


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
    derive: bool = False,
    loss_parallel: bool = True,
) -> nn.Module:
    """Parallelise `model` in place and return it, with the signature of torchtitan's `parallelize_fn`.

    The options come either from `config`, or from torchtitan's config sections: a field of a section sets the option of
    the same name.

    Args:
        model: a causal language model (token ids [batch, sequence] in, logits out), normally on meta. Under DDP all steps
            but the last are applied to a model on meta: call `apply_data_parallelism` once it has values.
        parallel_dims: torchtitan's ParallelDims, of any `spmd_backend`, or a `Mesh`.
        config: all options; then give none of the three sections.
        training, parallelism, compile_config: torchtitan's sections of these names.
        ac_config: what to recompute, as an `ActivationCheckpoint` or a torchtitan ActivationCheckpointing.Config. None:
            use `config`.
        dump_folder: folder for files that a training step writes, such as torch's plot of memory budgets.
        plan, derive: only without `config`: the plan to use; see `apply_plan`.
        loss_parallel: only without `config`: keep the logits sharded over the vocabulary (a DTensor, `Shard(-1)`).

    Raises:
        PlanError: the plan does not fit the model or the degree.
        OptionError: an option can't be honoured.
        ParallelError: the mesh or the model does not allow it. All errors are raised before any weight moves.
    """
    sections = [section for section in (training, parallelism, compile_config) if section is not None]
    if config is not None and (sections or plan is not None or derive or not loss_parallel):
        raise ParallelError(
            "parallelize got config, which already has the options of the sections, the plan, derive and loss_parallel: "
            "give either config or these arguments"
        )
    if config is None:
        options = {"plan": plan, "derive": derive, "disable_loss_parallel": not loss_parallel}
        config = _from_sections(sections, compile_config, options)
    if ac_config is not None:
        is_ours = isinstance(ac_config, ActivationCheckpoint)
        config = config.replace(activation_checkpoint=ac_config if is_ours else _TORCHTITANS)
    check_compatible(model, parallel_dims, config)
    apply_steps(model, parallel_dims, config, ac_config, dump_folder)
    return model


def parallelize_stage(
    model: nn.Module, stages: Stages, index: int, parallel_dims: Any, config: Config, dump_folder: str = ""
) -> None:
    """Turn `model`, an unsplit model on meta, into stage `index` of a pipeline and parallelise it, in place.

    The plan is checked against the unsplit model, before the modules of other stages are removed. For the other arguments
    and the errors see `parallelize`.
    """
    check_compatible(model, parallel_dims, config, stage=True)
    apply_steps(model, parallel_dims, config, dump_folder=dump_folder, stage=(stages, index))
    stage = record_of(model).stage
    assert stage is not None
    stage.watch()


def apply_steps(
    model: nn.Module,
    mesh: Any,
    config: Config,
    ac_config: Any = None,
    dump_folder: str = "",
    stage: tuple[Stages, int] | None = None,
) -> None:
    """Apply the steps of `parallelize` after `check_compatible`; `stage`: the pipeline's stages and the index of this one.

    Raises:
        PlanError, OptionError, ParallelError: as `parallelize`.
    """
    record, over = record_of(model), fsdp_mesh(mesh)
    meshes, experts = split_meshes(mesh), expert_meshes(mesh)
    backend = None if meshes is None else dist.get_backend(meshes.tp_cp.get_group())
    checked = _prepare(model, config, Degrees(tp=mesh.tp, cp=mesh.cp, ep=mesh.ep), over.device_type, backend)
    if (converted := record.float8) is not None:
        if config.float8.enable_fsdp_float8_all_gather:
            plan = None if checked is None else checked.plan
            check_gather(model, plan, converted.converted, over.size(over.ndim - 1), config.float8)
        _log.info(_describe_float8(converted))
    if (adapters := record.adapters) is not None:
        _log.info(
            f"LoRA of rank {config.lora.rank}: {len(adapters.modules)} Linear modules, {len(adapters.left_out)} left out, "
            f"{adapters.trained:,} of {adapters.trained + adapters.frozen:,} parameters train"
            + (f", {small} frozen weights in NF4" if (small := len(quantised(model))) else "")
        )

    # Splitting comes before any wrapper: a plan names modules as the model does, and shards full parameters.
    recomputed = config.activation_checkpoint if ac_config is None else ac_config
    names = None
    if stage is not None:
        stages, index = stage
        # Found while the model is unsplit: a policy such as "every second block" counts the blocks of all stages.
        recomputed_names = check_activation_checkpointing(model, config.activation_checkpoint)
        names = [name for name in recomputed_names if is_present(name, stages.absent[index])]
        record.stage, record.unsplit_names = stages.build_stage(model, index), stages.unsplit_names(index)
        record.steps.append(f"pipeline parallelism, stage {index} of {len(stages)}")
        checked = None if checked is None else checked.of_stage(stages.absent[index])
    if checked is not None:
        ep = None if experts is None else experts.ep
        capacity = getattr(config, "expert_capacity_factor", None)  # DDP has no expert parallelism
        if meshes is None:  # expert parallelism alone
            meshes = meshes_of(mesh_of_one(over.device_type))
        # sum_over_cp=False: data parallelism includes the context-parallel ranks, and sums their gradients.
        record.plan = split(checked, choose_way(checked, meshes, ep, capacity, sum_over_cp=False))
        counts = Counter(type(style).__name__ for style in record.plan.styles.values())
        degrees = {
            name: degree
            for name, degree in (("tensor", mesh.tp), ("context", mesh.cp), ("expert", mesh.ep))
            if degree > 1
        }
        title = ", ".join(f"{name} parallel {degree}" for name, degree in degrees.items()).capitalize()
        _log.info(f"Plan: {record.plan.plan.origin}")
        _log.info(f"{title}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
        record.steps += [f"{name} parallelism" for name in degrees]

    # Before compile, so that the compiler sees the recomputation.
    if config.activation_checkpoint.mode != "none":
        apply_activation_checkpointing(model, recomputed, dump_folder, names)
        record.steps.append("activation checkpointing")
        record.policy = _describe_recomputation(recomputed)

    # Before data parallelism, whose hooks on blocks and parameters stay outside the compiled graphs.
    if config.compile.blocks:
        async_tp = isinstance(config, FSDP2Config) and config.enable_async_tensor_parallel
        apply_compile(model, config.compile, mesh, async_tensor_parallel=async_tp)
        record.steps.append("compile")

    if isinstance(config, FSDP2Config) or not on_meta(model):
        apply_data_parallelism(model, mesh, config)


def dry_run(model: nn.Module, config: Config, degrees: Degrees, device_type: str) -> None:
    """Make those checks of `parallelize` that need no mesh. `model` is on meta, and can't be used afterwards.

    Raises:
        PlanError, OptionError, ParallelError: as `parallelize`.
    """
    _prepare(model, config, degrees, device_type)
    check_activation_checkpointing(model, config.activation_checkpoint)


def _prepare(
    model: nn.Module,
    config: Config,
    degrees: Degrees,
    device_type: str,
    backend: str | None = None,
) -> Checked | None:
    """Convert to float8, add adapters and freeze; then check the plan against `model`. None if all degrees are 1."""
    record, splits = record_of(model), degrees != Degrees()
    # A kept plan (`titanplans derive --keep`) is found by the structure of the model, so before its modules are converted.
    plan = find_plan(config.plan, model, derive=config.derive) if splits else config.plan
    record.float8, record.adapters, frozen = prepare(
        model,
        float8=config.float8,
        lora=config.lora,
        freezes=config.freeze,
        device_type=device_type,
        compiled=bool(config.compile.blocks),
        refuse=lambda why: config.error("freeze", why),
    )
    changes = {"float8": record.float8, "LoRA": record.adapters, "freezing": frozen}
    record.steps += [step for step, change in changes.items() if change is not None]
    checked = None
    if splits:
        options, weight_dtype = TPOptions(degrees), None
        if isinstance(config, FSDP2Config):
            weight_dtype = dtype(config.mixed_precision_param)
            options = replace(
                options,
                loss_parallel=not config.disable_loss_parallel,
                sequence_parallel=config.enable_sequence_parallel,
            )
        checked = check(resolve_plan(plan, model, options), model, backend, weight_dtype)

    # Roles are found now: a sharded parameter is a new tensor without the model's marks (`_no_weight_decay`), and split
    # modules no longer have the full head counts, from which a plan computes packed sections.
    if record.roles is None:
        styles = None if checked is None else checked.plan.styles
        record.roles = find_roles(model, plan, styles)
    return checked


def apply_data_parallelism(model: nn.Module, mesh: Any, config: Config) -> None:
    """Apply FSDP2 or DDP, the last step. FSDP2 is applied over one rank too, for its mixed precision."""
    if isinstance(config, DDPConfig):
        record_of(model).replicas = _ddp_mesh(mesh)
        apply_ddp(model, _ddp_mesh(mesh), config)
        record_of(model).steps.append("DDP")
        return
    over = fsdp_mesh(mesh)
    if (autocast := dtype(config.autocast_dtype)) is not None:
        apply_autocast(model, over.device_type, autocast)
        record_of(model).steps.append("autocast")
    experts = expert_meshes(mesh)
    for module in model.modules():
        if isinstance(module, StandInModule):
            module.compute_in(dtype(config.mixed_precision_param))
    shard(model, over, config, over if experts is None else experts.fsdp)
    gathers_float8 = config.float8.enable_fsdp_float8_all_gather
    if gathers_float8:
        gather_in_float8(model)
    has_tp_scales = mesh.tp_enabled and not gathers_float8 and config.float8.recipe_name == "tensorwise"
    if config.float8.precompute_float8_dynamic_scale_for_fsdp or has_tp_scales:
        compute_scales_together(model, dtype(config.mixed_precision_param))
    record_of(model).steps.append("FSDP2")


def check_compatible(model: nn.Module, mesh: Any, config: Config, *, stage: bool = False) -> None:
    """Refuse options of `config` that can't be honoured for `model` on `mesh`; the model is not changed.

    `stage`: the model will become a pipeline stage, so a pipeline degree above 1 is allowed.

    Raises:
        OptionError, ParallelError: as `parallelize`.
        PlanError: `model` has no list of blocks.
    """
    over = fsdp_mesh(mesh)
    refuse_degrees(mesh, ddp=isinstance(config, DDPConfig), stage=stage)
    if isinstance(config, DDPConfig) and not on_meta(model):
        refuse_model(model, _ddp_mesh(mesh))
    check_on_mesh(
        StrategyOnMesh(
            config=config,
            tp=mesh.tp,
            cp=mesh.cp,
            ep=mesh.ep,
            dp_replicate=mesh.dp_replicate,
            dp_shard=over.size(over.ndim - 1),
            device_type=over.device_type,
            nccl=mesh.tp_enabled and has_nccl(mesh),
            one_graph=not config.compile.blocks or (mesh.cp == mesh.ep == 1 and one_graph_a_block(model)),
        )
    )
    if isinstance(config, FSDP2Config):
        check_shard(model, over, config)
    if config.float8.recipe_name is not None:
        check_float8_options(config.float8, over.device_type)
    check_activation_checkpointing(model, config.activation_checkpoint)
    if config.compile.enable:
        compile_options(config.compile)


def _from_sections(sections: Sequence[Any], compile_config: Any, options: dict[str, Any]) -> FSDP2Config:
    for section in sections:
        options |= _common_fields(FSDP2Config, section)
    if compile_config is not None and compile_config.enable:
        options["compile"] = Compile(**_common_fields(Compile, compile_config))
    return FSDP2Config(**options)


def _common_fields(cls: type[Options], section: Any) -> dict[str, Any]:
    """Return the values of the fields that `cls` and `section`, of torchtitan's config, both have, except nested groups."""
    names = [field.name for field in options_of(cls) if not isinstance(field.default, Options)]
    return {name: getattr(section, name) for name in names if hasattr(section, name)}


def dtype(name: str | None) -> torch.dtype | None:
    """Return torch's dtype of this name; None for None."""
    return None if name is None else getattr(torch, name)


def on_meta(model: nn.Module) -> bool:
    """Whether some parameter or buffer of `model` is on meta."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _describe_float8(conversion: Conversion) -> str:
    emulated = ", emulated" if conversion.emulated else ""
    return (
        f"Float8 {conversion.recipe}{emulated}: {len(conversion.converted)} Linear modules, "
        f"{len(conversion.filtered)} left out"
    )


def _describe_recomputation(options: Any) -> str:
    """Return the mode of recomputation and the options that are not at their defaults."""
    if not isinstance(options, ActivationCheckpoint):
        return type(options).__qualname__
    values = {field.name: getattr(options, field.name) for field in options_of(ActivationCheckpoint)}
    default = ActivationCheckpoint(mode=options.mode)
    changed = [f"{name} = {show(value)}" for name, value in values.items() if value != getattr(default, name)]
    return options.mode + (f" ({', '.join(changed)})" if changed else "")


def _ddp_mesh(mesh: Any) -> DeviceMesh:
    return mesh.get_mesh("loss") if mesh.dp_cp_enabled else fsdp_mesh(mesh)
