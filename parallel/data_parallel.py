"""Data parallelism by FSDP2: sharded (FSDP), replicated and sharded (HSDP), or replicated only.

Applied at every degree: at 1 it shards nothing, and casts parameters and gradients for mixed
precision, which in torchtitan 0.3 comes from here alone. The loss is divided by the number of
tokens of the whole batch before the backward, so gradients are summed, not averaged.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from parallel.errors import ParallelError
from plans.structure import find_decoder


def apply_fsdp(model: nn.Module, parallel_dims: Any, training: Any, parallelism: Any) -> None:
    """Shard `model` over the data-parallel mesh, in place: embedding, each block, norm with head, root.

    A replicate degree above 1 makes the mesh 2-D: gradients are summed over it as well (HSDP), and
    with a shard degree of 1 that is all that happens, as in DDP.
    """
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    policy = parallelism.fsdp_reshard_after_forward
    if policy not in ("default", "always", "never"):
        raise ParallelError(f"fsdp_reshard_after_forward = {policy!r}: 'default', 'always' or 'never'")
    options = {
        "mesh": parallel_dims.get_mesh(names),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy(),
    }
    reshard = policy != "never"
    decoder = find_decoder(model)
    ends = [model.get_submodule(name) for name in (decoder.norm, decoder.head) if name is not None]
    embedding = model.get_submodule(decoder.embedding) if decoder.embedding is not None else None
    if embedding is not None and _tied(embedding, ends):
        ends = [embedding, *ends]
    elif embedding is not None:
        fully_shard(embedding, **options, reshard_after_forward=reshard)
    for name in decoder.layers:
        fully_shard(model.get_submodule(name), **options, reshard_after_forward=reshard)
    if ends:
        # The backward needs them at once: resharded only if that is asked for.
        fully_shard(ends, **options, reshard_after_forward=policy == "always")
    fully_shard(model, **options)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(
                True
            )  # else a factor of 1 is a PREMUL_SUM, which gloo lacks
            if parallelism.enable_fsdp_symm_mem:
                module.set_symm_mem_for_comm()


def _tied(embedding: nn.Module, ends: list[nn.Module]) -> bool:
    ours = {id(param) for param in embedding.parameters()}
    return any(id(param) in ours for end in ends for param in end.parameters())
