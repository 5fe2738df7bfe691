"""FSDP2's policies from this project's options: what is freed after the forward, and what lies on the CPU.

Refused here is what a mesh can't do; which units the policies go to is in `fsdp`.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from titanplans.errors import OptionError, ParallelError, either

Reshard = Literal["default", "always", "never"] | int


def fsdp_policies(
    mesh: DeviceMesh, reshard: Reshard, cpu_offload: bool, pin_memory: bool | None, symmetric_memory: bool
) -> tuple[Literal["default", "always", "never"] | int, OffloadPolicy]:
    """Return what is resharded and offloaded; refuse what this mesh can't do."""
    if symmetric_memory and mesh.device_type != "cuda":
        raise OptionError(
            "enable_fsdp_symm_mem",
            True,
            f"it needs CUDA, and this mesh is on {mesh.device_type}: leave it out",
        )
    return _reshard_policy(reshard, mesh), _offload_policy(cpu_offload, pin_memory)


def _reshard_policy(value: Reshard, mesh: DeviceMesh) -> Literal["default", "always", "never"] | int:
    size = shard_size(mesh)
    if isinstance(value, int) and not isinstance(value, bool):
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        if value not in divisors:
            raise OptionError(
                "fsdp_reshard_after_forward",
                value,
                f"parameters are sharded over {size} ranks, of which {either(divisors)} can hold a copy",
            )
        if value not in (1, size) and mesh.size() != dist.get_world_size():
            # FSDP2 makes the smaller groups rank by rank, under one name for all: they wait for each other for ever.
            raise OptionError(
                "fsdp_reshard_after_forward",
                value,
                f"torch can reshard to some ranks only where data parallelism covers all {dist.get_world_size()} ranks, "
                f"here {mesh.size()}: take default, or degrees of 1 beside it",
            )
        return value
    if value not in ("default", "always", "never"):
        raise OptionError(
            "fsdp_reshard_after_forward", value, "take default, always, never or a number of ranks"
        )
    return value


def shard_size(mesh: DeviceMesh) -> int:
    """Return the number of ranks that share one copy of the parameters: the last dimension's size."""
    if mesh.ndim > 2:
        raise ParallelError(
            f"FSDP over a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}: one to shard over, or two to "
            "replicate and shard; flatten the others"
        )
    return mesh.size(mesh.ndim - 1)


def _offload_policy(cpu_offload: bool, pin_memory: bool | None) -> OffloadPolicy:
    if not cpu_offload:
        if pin_memory:
            raise OptionError("pin_cpu_memory", True, "nothing is offloaded: set enable_cpu_offload to true")
        return OffloadPolicy()
    if pin_memory and not torch.accelerator.is_available():
        raise OptionError("pin_cpu_memory", True, "there is no accelerator to pin for: leave it out")
    return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available() if pin_memory is None else pin_memory)
