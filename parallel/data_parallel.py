"""Data parallelism as torchtitan's options name it: a translation of them for `fsdp.shard`."""

from typing import Any

import torch
from torch import nn

from parallel.fsdp import shard


def apply_fsdp(model: nn.Module, parallel_dims: Any, training: Any, parallelism: Any) -> None:
    """Shard `model` over the data-parallel mesh, in place; at degree 1 only its dtypes change.

    A replicate degree above 1 makes the mesh 2-D: gradients are summed over it as well (HSDP), and
    with a shard degree of 1 that is all that happens, as in DDP.

    Raises:
        ParallelError: an option can't be honoured. See `fsdp.shard`.
    """
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    shard(
        model,
        parallel_dims.get_mesh(names),
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        cpu_offload=training.enable_cpu_offload,
        symmetric_memory=parallelism.enable_fsdp_symm_mem,
    )
