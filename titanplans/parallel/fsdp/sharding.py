"""FSDP2 on a decoder: what each unit keeps gathered, its dtypes, where its shards lie, what is prefetched.

Which modules are units is in `units`. `shard` applies at every size of the mesh: over one
process it shards nothing, and still casts for mixed precision and offloads. The loss is divided by
the number of tokens of the whole batch before the backward, so gradients are summed, not averaged.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from titanplans.errors import OptionError, ParallelError
from titanplans.parallel.fsdp.construction import independent_of_world
from titanplans.parallel.fsdp.policies import Reshard, fsdp_policies, shard_size
from titanplans.parallel.fsdp.prefetch import chain_units, check_depth
from titanplans.parallel.fsdp.units import Unit, find_units, fsdp_module, split_dtypes
from titanplans.torch_private import fsdp_group, reshard_to


class ShardOptions(TypedDict, total=False):
    """What `shard` and `shard_model` have in common; see `shard`."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cast_forward_inputs: bool
    reshard_after_forward: Reshard
    cpu_offload: bool
    pin_memory: bool | None
    symmetric_memory: bool


class DecoderOptions(ShardOptions, total=False):
    """What `shard` takes besides: it knows the order in which a decoder's units run."""

    forward_prefetch: int
    backward_prefetch: int
    towers: Literal["units", "root"]


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = False,
    reshard_after_forward: Reshard = "default",
    cpu_offload: bool = False,
    pin_memory: bool | None = None,
    forward_prefetch: int = 0,
    backward_prefetch: int = 0,
    towers: Literal["units", "root"] = "units",
    symmetric_memory: bool = False,
) -> list[Unit]:
    """Shard `model` over the data-parallel `mesh`, in place, and return its units.

    Parameters may be DTensors on a TP mesh that comes from the same root mesh as `mesh`. Gradients
    are summed over the mesh.

    Args:
        model: a decoder (`titanplans.tensor_parallel.decoder`), before its first forward, on meta or not.
        mesh: 1-D; or 2-D, replicated over the first dimension and sharded over the second (HSDP).
        param_dtype: dtype of gathered parameters, and so of compute; None: as stored.
        reduce_dtype: dtype in which gradients are summed and, if the sum is deferred, accumulated;
            None: that of the gradients, which is `param_dtype`.
        output_dtype: dtype of the floating-point tensors that `model` returns (a tensor, or a dict,
            tuple or dataclass of them); None: as computed. Units inside hand on what they compute.
        cast_forward_inputs: cast floating-point inputs of each unit to `param_dtype`: needed for images in
            another dtype; takes rotary tables that are handed to the blocks along.
        reshard_after_forward: what is freed between forward and backward, and gathered again.
            "default": blocks, towers and the embedding, not the last block, the ends, or the root,
            which the backward needs at once; "always": every unit; "never": none; a number of ranks, a
            divisor of the shard size: as "default", but to shards over that many neighbouring ranks,
            from which the backward gathers; only if `mesh` covers all ranks.
        cpu_offload: keep parameters, gradients and with them the optimizer's states on the CPU.
        pin_memory: page-locked memory for these; None: if there is an accelerator.
        forward_prefetch, backward_prefetch: how many units ahead are gathered, in the order of
            execution; 0: torch's own rule (none ahead in the forward, one in the backward).
        towers: whether each block of another list than the decoder's, such as a vision encoder's, is a
            unit, or part of the root. As units, every rank must run the tower in a step, or none.
        symmetric_memory: communicate through symmetric memory (CUDA, NCCL).

    Raises:
        PlanError: `model` has no list of blocks.
        ParallelError: an option can't be honoured, or parameters can't be grouped. Before anything is sharded.
    """
    units = check_shard(
        model,
        mesh,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
        pin_memory=pin_memory,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        towers=towers,
        symmetric_memory=symmetric_memory,
    )
    apply_units(
        model,
        units,
        mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=output_dtype,
        cast_forward_inputs=cast_forward_inputs,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
        pin_memory=pin_memory,
        symmetric_memory=symmetric_memory,
    )
    chain_units(model, units, forward_prefetch, backward_prefetch)
    if towers == "root":
        # A rank without images has no gradient for the tower, and must still join the others' sum.
        fsdp_module(model, "").set_reduce_scatter_unused_params(True, recurse=False)
    return units


def check_shard(model: nn.Module, mesh: DeviceMesh, **options: Unpack[DecoderOptions]) -> list[Unit]:
    """Return the units that `shard` would make, with nothing touched; arguments and errors are those of `shard`."""
    towers = options.get("towers", "units")
    if towers not in ("units", "root"):
        raise OptionError("fsdp_towers", towers, "take units or root")
    sharded = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if sharded is not None:
        raise ParallelError(
            f"{type(model).__name__} is sharded already ({sharded or 'the root'}): once is enough; build the model again"
        )
    units = split_dtypes(model, find_units(model, towers))
    gathers = shard_size(mesh) > 1
    reshard = options.get("reshard_after_forward", "default")
    check_depth("fsdp_forward_prefetch", options.get("forward_prefetch", 0), len(units), gathers, True)
    check_depth(
        "fsdp_backward_prefetch",
        options.get("backward_prefetch", 0),
        len(units),
        gathers,
        reshard not in ("never", 1),
    )
    fsdp_policies(
        mesh,
        reshard,
        options.get("cpu_offload", False),
        options.get("pin_memory"),
        options.get("symmetric_memory", False),
    )
    return units


def apply_units(
    model: nn.Module,
    units: Sequence[Unit],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = False,
    reshard_after_forward: Reshard = "default",
    cpu_offload: bool = False,
    pin_memory: bool | None = None,
    symmetric_memory: bool = False,
) -> None:
    """Shard the given units, the root among them, innermost first; for the options see `shard`."""
    policy, offload = fsdp_policies(mesh, reshard_after_forward, cpu_offload, pin_memory, symmetric_memory)
    inside = MixedPrecisionPolicy(param_dtype, reduce_dtype, None, cast_forward_inputs)
    outside = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype, cast_forward_inputs)
    shared: Any = None
    with independent_of_world():
        for unit in sorted(units, key=_depth, reverse=True):
            for part in (*unit.inner, unit):
                modules = [model.get_submodule(name) for name in part.names]
                reshard = _resharded(unit, policy)  # what is inside a unit lives as long as the unit itself
                to_some = not isinstance(reshard, bool)
                fully_shard(
                    modules if len(modules) > 1 else modules[0],
                    mesh=mesh,
                    mp_policy=outside if part.role == "root" else inside,
                    offload_policy=offload,
                    reshard_after_forward=True if to_some and shared else reshard,
                )
                group = fsdp_group(fsdp_module(model, part.names[0]))
                if to_some and group is not None:
                    # One smaller mesh for all units: FSDP2 would make two process groups for each.
                    shared = shared or group.post_forward_mesh_info
                    reshard_to(group, shared)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise a factor of 1 is a PREMUL_SUM, which gloo lacks.
            module.set_force_sum_reduction_for_comms(True)
            if symmetric_memory:
                module.set_symm_mem_for_comm()


def _depth(unit: Unit) -> int:
    # Several modules in one unit stand beside each other, outside of every other unit but the root.
    return 0 if unit.role == "root" else max(name.count(".") for name in unit.names) + 1


def _resharded(unit: Unit, policy: Literal["default", "always", "never"] | int) -> bool | int:
    if policy in ("always", "never"):
        return policy == "always"
    if unit.last or unit.role in ("ends", "root"):
        return False
    # FSDP2 takes 1 for a mistake, and means False by it.
    return True if policy == "default" else policy != 1 and policy
