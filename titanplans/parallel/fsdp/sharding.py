"""Shard a decoder by FSDP2: for each unit, set its dtypes, its mesh and whether it is resharded after the forward.

FSDP2 is also applied over a mesh of one rank, for mixed precision and offload.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from titanplans.config import FSDP2Config
from titanplans.errors import ParallelError, either
from titanplans.parallel.fsdp.construction import independent_of_world
from titanplans.parallel.fsdp.dtypes import split_dtypes
from titanplans.parallel.fsdp.images import check_images
from titanplans.parallel.fsdp.prefetch import chain_units, check_depth
from titanplans.parallel.fsdp.units import FSDPUnit, find_units, fsdp_module, split_experts
from titanplans.parallel.record import record_of
from titanplans.split.parameters.loaded_state import load_as_shards
from titanplans.split.parameters.replaced import replacing
from titanplans.split.partial_gradients import sum_partial
from titanplans.text import class_name
from titanplans.torch_private.fsdp import fsdp_group, unreduced_gradients


def shard(
    model: nn.Module, mesh: DeviceMesh, config: FSDP2Config, of_experts: DeviceMesh | None = None
) -> list[FSDPUnit]:
    """Shard `model` over the data-parallel `mesh`, in place, and return its units.

    Parameters may be DTensors on a TP mesh of the same root mesh as `mesh`. Gradients are summed over the mesh, not
    averaged: the loss is divided by the number of tokens of the global batch.

    Args:
        model: a decoder (`titanplans.split.decoder`), before its first forward, on meta or not.
        mesh: 1-D; or 2-D, replicated over the first dimension and sharded over the second (HSDP).
        config: the options of FSDP2, mixed precision and offload.
        of_experts: under expert parallelism the mesh of the ranks that hold the same experts, 1-D or 2-D as `mesh`.

    Raises:
        PlanError: `model` has no list of blocks.
        OptionError: an option can't be honoured for this model or mesh.
        ParallelError: the parameters can't be grouped. Like the other errors, it is raised before anything is sharded.
    """
    units = check_shard(model, mesh, config)
    units = split_experts(model, units)
    apply_units(model, units, mesh, config, of_experts)
    chain_units(model, units, config.fsdp_forward_prefetch, config.fsdp_backward_prefetch)
    if config.fsdp_towers == "root":
        # A rank without images has no gradient for the tower, and must still take part in the reduce-scatter.
        fsdp_module(model, "").set_reduce_scatter_unused_params(True, recurse=False)
    elif mesh.size() > 1 and any(unit.role == "tower" for unit in units):
        record_of(model).image_check = check_images(model, mesh, config)
    return units


def check_shard(model: nn.Module, mesh: DeviceMesh, config: FSDP2Config) -> list[FSDPUnit]:
    """Return the units that `shard` would create, without changing `model`; raises the errors of `shard`."""
    check_unsharded(model)
    units = split_dtypes(model, find_units(model, config.fsdp_towers), param_dtype(config))
    check_mesh(mesh, config)
    for option in ("fsdp_forward_prefetch", "fsdp_backward_prefetch"):
        check_depth(config, option, len(units), shard_size(mesh))
    return units


def check_unsharded(model: nn.Module) -> None:
    """Raise ParallelError if `model`, or a module in it, is already sharded by FSDP."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ParallelError(
                f"{class_name(model)} is already sharded by FSDP ({name or 'the root'}): build the model again"
            )


_TORCH_2_13 = (
    ("fsdp_towers", "root", "set_reduce_scatter_unused_params"),
    ("enable_fsdp_symm_mem", True, "set_symm_mem_for_comm"),
)
"""(option, value, method): with this value the option calls a method of FSDPModule that torch 2.11 lacks."""


def check_mesh(mesh: DeviceMesh, config: FSDP2Config) -> None:
    """Raise OptionError if `mesh` or this version of torch does not support an option of `config`."""
    for option, value, method in _TORCH_2_13:
        if getattr(config, option) == value and not hasattr(FSDPModule, method):
            raise config.error(
                option, f"it needs torch 2.13, and this is torch {torch.__version__}: leave it out"
            )
    size, ranks = shard_size(mesh), config.fsdp_reshard_after_forward
    if isinstance(ranks, int):
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        if ranks not in divisors:
            raise config.error(
                "fsdp_reshard_after_forward",
                f"parameters are sharded over {size} ranks: {either(divisors)} of them can hold a copy",
            )
        if ranks not in (1, size) and mesh.size() != dist.get_world_size():
            # FSDP2 gives all the smaller groups the same name, so the creation of several such groups deadlocks.
            raise config.error(
                "fsdp_reshard_after_forward",
                f"torch can reshard to a part of the ranks only if data parallelism covers all {dist.get_world_size()}, "
                f'and here it covers {mesh.size()}: set it to "default", or set the other degrees to 1',
            )
    on_nvidia = mesh.device_type == "cuda" and torch.version.hip is None
    if config.enable_fsdp_symm_mem and on_nvidia and torch.cuda.get_device_capability() < (9, 0):
        raise config.error(
            "enable_fsdp_symm_mem",
            f"symmetric memory needs CUDA capability 9.0, which {torch.cuda.get_device_name()} lacks: leave it out",
        )
    if config.pin_cpu_memory and not torch.accelerator.is_available():
        raise config.error("pin_cpu_memory", "there is no accelerator to pin for: leave it out")


def param_dtype(config: FSDP2Config) -> torch.dtype | None:
    """Return the dtype to which FSDP2 casts parameters for forward and backward; None: it does not cast them."""
    return None if config.mixed_precision_param is None else getattr(torch, config.mixed_precision_param)


def shard_size(mesh: DeviceMesh) -> int:
    """Return the number of ranks over which a replica of the parameters is sharded: the size of the last dimension."""
    if mesh.ndim > 2:
        raise ParallelError(
            f"FSDP over a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}: give one dimension to "
            "shard over, or two to replicate and shard over; flatten the others"
        )
    return mesh.size(mesh.ndim - 1)


def apply_units(
    model: nn.Module,
    units: Sequence[FSDPUnit],
    mesh: DeviceMesh,
    config: FSDP2Config,
    of_experts: DeviceMesh | None = None,
) -> None:
    """Shard `units`, including the root, innermost first; units of experts over the mesh `of_experts`."""
    param = param_dtype(config)
    reduce, output = (
        None if name is None else getattr(torch, name)
        for name in (config.mixed_precision_reduce, config.mixed_precision_output)
    )
    inside = MixedPrecisionPolicy(param, reduce, None, config.mixed_precision_cast_inputs)
    outside = MixedPrecisionPolicy(param, reduce, output, config.mixed_precision_cast_inputs)
    offload = OffloadPolicy()
    if config.enable_cpu_offload:
        pin = config.pin_cpu_memory
        offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available() if pin is None else pin)
    post_forward_mesh: Any = None
    is_split = any(isinstance(param, DTensor) for param in model.parameters())
    with independent_of_world():
        for unit in sorted(units, key=_depth, reverse=True):
            for part in (*unit.inner, unit):
                modules = [model.get_submodule(name) for name in part.names]
                # Decided for the outer `unit`, not for `part`: an inner unit stays gathered as long as the outer unit.
                reshard = _reshards(unit, config, record_of(model).stage is not None)
                reshards_to_some = not isinstance(reshard, bool)
                policy = outside if part.role == "root" else inside
                if part.kept:  # the model casts its inputs itself, as it does without FSDP
                    policy = replace(policy, param_dtype=torch.float32, cast_forward_inputs=False)
                with replacing(*modules):
                    fully_shard(
                        modules if len(modules) > 1 else modules[0],
                        mesh=of_experts if part.role == "experts" else mesh,
                        mp_policy=policy,
                        offload_policy=offload,
                        reshard_after_forward=True if reshards_to_some and post_forward_mesh else reshard,
                    )
                group = fsdp_group(fsdp_module(model, part.names[0]))
                if group is None:
                    continue
                if is_split:
                    # FSDP2 would all-reduce Partial gradients one by one.
                    _before_reducing(group, sum_partial)
                if reshards_to_some:
                    # One smaller mesh for all units: FSDP2 would create two process groups for each unit.
                    post_forward_mesh = post_forward_mesh or group.post_forward_mesh_info
                    _reshard_to(group, post_forward_mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise FSDP2 uses PREMUL_SUM for a factor of 1, which gloo does not support.
            module.set_force_sum_reduction_for_comms(True)
            if config.enable_fsdp_symm_mem:
                module.set_symm_mem_for_comm()
    load_as_shards(model)


def _depth(unit: FSDPUnit) -> int:
    # The root, which contains all other units, comes last in the order of sharding.
    return 0 if unit.role == "root" else max(name.count(".") for name in unit.names) + 1


def _reshards(unit: FSDPUnit, config: FSDP2Config, stage: bool) -> bool | int:
    """Return the argument reshard_after_forward of `fully_shard` for `unit`; `stage`: the model is a pipeline stage."""
    match config.fsdp_reshard_after_forward:
        case "default" if stage:  # otherwise each micro batch would gather it again
            return False
        case "always":
            return True
        case "never" | 1:  # resharding to 1 rank is not resharding; FSDP2 refuses a 1
            return False
        case ranks:
            # The backward uses these parameters first, so they stay gathered.
            if unit.last or unit.role in ("ends", "root"):
                return False
            return True if ranks == "default" else ranks


def _before_reducing(
    group: Any, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> None:  # private: torch FSDPParamGroup
    """Replace the list of unsharded gradients of `group` by `change(gradients)`, before each reduction of FSDP2."""
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        if group.reduce_grads:
            gradients = unreduced_gradients(group)
            changed = change([getattr(owner, name) for owner, name in gradients])
            for (owner, name), grad in zip(gradients, changed, strict=True):
                setattr(owner, name, grad)
        reduce(*unused)

    group.post_backward = post_backward


def _reshard_to(group: Any, mesh_info: Any) -> None:  # private: torch FSDPParamGroup
    """Set the mesh to which `group` reshards its parameters after the forward; another group has created this mesh."""
    for holder in (group, *group.fsdp_params):
        holder.post_forward_mesh_info = mesh_info
    for param in group.fsdp_params:  # the sizes of the shards still belong to the previous mesh
        param._init_sharded_post_forward_param_metadata(torch.empty(param._orig_size, device="meta"))
