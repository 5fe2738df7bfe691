"""Collectives on small Python objects; without a process group there is one process, of rank 0."""

from typing import Any

import torch.distributed as dist


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank. Collective."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the `value` of each rank of `group`, in rank order; None: all ranks. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
