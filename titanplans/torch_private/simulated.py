"""Ranks that torch's LocalTensor simulates in one process."""

import torch
from torch.distributed._local_tensor import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    maybe_run_for_local_tensor,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as dtensor_api

__all__ = [
    "LocalIntNode",
    "LocalTensor",
    "LocalTensorMode",
    "clear_sharding_cache",
    "dtensor_api",
    "maybe_run_for_local_tensor",
    "set_local_tensor",
    "simulated_ranks",
]


def simulated_ranks(tensor: LocalTensor) -> dict[int, torch.Tensor]:
    """Return what each simulated rank holds."""
    return tensor._local_tensors


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor of `tensor`."""
    tensor._local_tensor = local


def clear_sharding_cache() -> None:
    """Forget how DTensor has sharded operators."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imports the compiler

    _clear_sharding_prop_cache()
