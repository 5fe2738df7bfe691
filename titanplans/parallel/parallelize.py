"""`parallelize`: how a model becomes a parallel one, top-down: float8, tensor and context parallelism, recomputation,
compile, data parallelism. The one door: torchtitan's trainer and `ParallelManager` come through here, too.

Each step is a named function in a file of its own. Here is what comes after what, and why.
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
from titanplans.parallel.mesh.cuts import fsdp_mesh, meshes_of_experts, meshes_to_cut
from titanplans.parallel.mesh.degrees import refuse_degrees
from titanplans.parallel.mesh.mesh import mesh_of_one
from titanplans.parallel.optimizers.roles import find_roles
from titanplans.parallel.record import record_of
from titanplans.plan.custom import PlanSource, resolve_plan
from titanplans.plan.degrees import Degrees
from titanplans.plan.options import TPOptions
from titanplans.precision.autocast import apply_autocast
from titanplans.precision.float8.all_gather import gather_in_float8
from titanplans.precision.float8.checks import check_gather
from titanplans.precision.float8.conversion import Conversion, check_float8_options
from titanplans.precision.float8.scales import seek_scales_together
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
        parallel_dims: torchtitan's ParallelDims, of any `spmd_backend`, or a `Mesh`.
        config: the options; instead of the four sections.
        training, parallelism, compile_config: torchtitan's sections of these names.
        ac_config: what to recompute: an `ActivationCheckpoint`, a torchtitan ActivationCheckpointing.Config, or None for
            what `config` says.
        dump_folder: folder for what a step writes.
        plan: with torchtitan's sections: a plan of the user's own; None for the registered one. See `apply_plan`.
        loss_parallel: with torchtitan's sections: keep the logits sharded over the vocabulary (a DTensor, `Shard(-1)`).

    Raises:
        PlanError: the plan does not fit the model or the degree.
        OptionError: an option can't be honoured; the error has its name.
        ParallelError: the mesh or the model does not allow it. All before any weight moves.
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
        config = config.replace(activation_checkpoint=ac_config if ours else _TORCHTITANS)
    check_compatible(model, parallel_dims, config)
    apply_steps(model, parallel_dims, config, ac_config, dump_folder)
    return model


def parallelize_stage(
    model: nn.Module, stages: Stages, number: int, parallel_dims: Any, config: Config, dump_folder: str = ""
) -> None:
    """Make `model`, a copy of a whole one on meta, the stage of this `number` of a pipeline, and parallelise it, in place.

    The plan is checked against the whole model. Arguments and errors are those of `parallelize`.
    """
    check_compatible(model, parallel_dims, config, stage=True)
    apply_steps(model, parallel_dims, config, dump_folder=dump_folder, stage=(stages, number))
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
    """Do what `parallelize` does once nothing is to be refused; the arguments are its, and those of `parallelize_stage`."""
    record, over = record_of(model), fsdp_mesh(mesh)
    meshes, experts = meshes_to_cut(mesh), meshes_of_experts(mesh)
    backend = None if meshes is None else dist.get_backend(meshes.tp_cp.get_group())
    checked = _prepare(model, config, Degrees(tp=mesh.tp, cp=mesh.cp, ep=mesh.ep), over.device_type, backend)
    if (converted := record.float8) is not None:
        if config.float8.enable_fsdp_float8_all_gather:
            plan = None if checked is None else checked.plan
            check_gather(model, plan, converted.converted, over.size(over.ndim - 1), config.float8)
        _log.info(_words(converted))
    if (adapters := record.adapters) is not None:
        _log.info(
            f"LoRA of rank {config.lora.rank}: {len(adapters.modules)} Linear modules, {len(adapters.left)} left out, "
            f"{adapters.trained:,} of {adapters.trained + adapters.frozen:,} parameters train"
            + (f", {small} frozen weights in NF4" if (small := len(quantised(model))) else "")
        )

    # Before anything wraps a module: a plan names modules as the model has them, and shards whole parameters.
    recomputed = config.activation_checkpoint if ac_config is None else ac_config
    names = None
    if stage is not None:
        stages, number = stage
        every = check_activation_checkpointing(model, config.activation_checkpoint)
        names = [name for name in every if is_present(name, stages.absent[number])]
        record.stage, record.whole_names = stages.build_stage(model, number), stages.unsplit_names(number)
        record.steps.append(f"pipeline parallelism, stage {number} of {len(stages)}")
        checked = None if checked is None else checked.of_stage(stages.absent[number])
    if checked is not None:
        # Data parallelism is over all ranks that see other tokens, and sums their gradients.
        sharing = None if experts is None else experts.sharing
        capacity = getattr(config, "expert_capacity_factor", None)  # DDP shares out no experts
        if meshes is None:  # experts alone
            meshes = meshes_of(mesh_of_one(over.device_type))
        record.plan = split(checked, choose_way(checked, meshes, sharing, capacity, sum_over_cp=False))
        counts = Counter(type(style).__name__ for style in record.plan.styles.values())
        degrees = {
            name: degree
            for name, degree in (("tensor", mesh.tp), ("context", mesh.cp), ("expert", mesh.ep))
            if degree > 1
        }
        said = ", ".join(f"{name} parallel {degree}" for name, degree in degrees.items()).capitalize()
        _log.info(f"{said}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
        record.steps += [f"{name} parallelism" for name in degrees]

    # Before compile, so that the compiler sees the recomputation.
    if config.activation_checkpoint.mode != "none":
        apply_activation_checkpointing(model, recomputed, dump_folder, names)
        record.steps.append("activation checkpointing")
        record.policy = _in_words(recomputed)

    # Before data parallelism, whose hooks on blocks and parameters stay outside the compiled graphs.
    if config.compile.blocks:
        async_tp = isinstance(config, FSDP2Config) and config.enable_async_tensor_parallel
        apply_compile(model, config.compile, mesh, async_tensor_parallel=async_tp)
        record.steps.append("compile")

    if isinstance(config, FSDP2Config) or not on_meta(model):
        apply_data_parallelism(model, mesh, config)


def dry_run(model: nn.Module, config: Config, degrees: Degrees, device_type: str) -> None:
    """Take the steps of `parallelize` that need no mesh, on a model on meta, which is of no use afterwards.

    What depends on the meshes is refused in `parallelize`.

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
    """Prepare the modules of `model` and check its plan; None where nothing is split. Nothing is logged."""
    record = record_of(model)
    record.float8, record.adapters, frozen = prepare(
        model,
        float8=config.float8,
        lora=config.lora,
        freezes=config.freeze,
        device_type=device_type,
        compiled=bool(config.compile.blocks),
        refuse=lambda why: config.error("freeze", why),
    )
    done = {"float8": record.float8, "LoRA": record.adapters, "freezing": frozen}
    record.steps += [step for step, change in done.items() if change is not None]
    checked = None
    if degrees != Degrees():
        options, weights = TPOptions(degrees), None
        if isinstance(config, FSDP2Config):
            weights = dtype(config.mixed_precision_param)
            options = replace(
                options,
                loss_parallel=not config.disable_loss_parallel,
                sequence_parallel=config.enable_sequence_parallel,
            )
        checked = check(resolve_plan(config.plan, model, options), model, backend, weights)

    # Parameters lose what a model has marked on them when they are sharded, and modules their numbers when they are split.
    if record.roles is None:
        known = None if checked is None else checked.plan.styles
        record.roles = find_roles(model, config.plan, known)
    return checked


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
    experts = meshes_of_experts(mesh)
    for module in model.modules():
        if isinstance(module, StandInModule):
            module.compute_in(dtype(config.mixed_precision_param))
    shard(model, over, config, over if experts is None else experts.fsdp)
    gathers = config.float8.enable_fsdp_float8_all_gather
    if gathers:
        gather_in_float8(model)
    split = mesh.tp_enabled and not gathers and config.float8.recipe_name == "tensorwise"
    if config.float8.precompute_float8_dynamic_scale_for_fsdp or split:
        seek_scales_together(model, dtype(config.mixed_precision_param))
    record_of(model).steps.append("FSDP2")


def check_compatible(model: nn.Module, mesh: Any, config: Config, *, stage: bool = False) -> None:
    """Refuse what can't be honoured of `config` for `model` on `mesh`, or for a `stage` of it; nothing is touched.

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
    """Return the recomputation in words, with the options that are not their defaults."""
    if not isinstance(recomputed, ActivationCheckpoint):
        return type(recomputed).__qualname__
    given = {field.name: getattr(recomputed, field.name) for field in options_of(ActivationCheckpoint)}
    default = ActivationCheckpoint(mode=recomputed.mode)
    words = [f"{name} = {show(value)}" for name, value in given.items() if value != getattr(default, name)]
    return recomputed.mode + (f" ({', '.join(words)})" if words else "")


def _ddp_mesh(mesh: Any) -> DeviceMesh:
    return mesh.get_mesh("loss") if mesh.dp_cp_enabled else fsdp_mesh(mesh)
