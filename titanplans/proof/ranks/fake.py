"""Ranks that do not exist, on torch's fake process group: for code that needs a mesh and no communication."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanplans.errors import PlanError
from titanplans.torch_private.distributed import fake_store
from titanplans.torch_private.dtensor import clear_sharding_cache


@contextmanager
def fake_ranks(number: int, cp: int = 1, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """Give a mesh of `number` ranks: "tp", or "cp" and "tp" with `cp` ranks in the former.

    This process is the first, and the others do not exist. A collective returns the right shape and arbitrary values.

    Raises:
        PlanError: this process is a rank already.
    """
    refuse_a_rank()
    dist.init_process_group("fake", rank=0, world_size=number, store=fake_store())
    try:
        # DTensor remembers shardings by mesh, and takes a mesh of the same shape, whose process group is gone, for equal.
        clear_sharding_cache()
        shape = mesh_sizes(number, cp)
        yield init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()


def mesh_sizes(ranks: int, cp: int) -> dict[str, int]:
    """Return the dimensions of a mesh of so many ranks, in which `cp` neighbours each share a sequence."""
    return {"tp": ranks} if cp == 1 else {"cp": cp, "tp": ranks // cp}


def refuse_a_rank() -> None:
    """Refuse a process that is a rank itself.

    Raises:
        PlanError: the default process group exists.
    """
    if dist.is_initialized():
        raise PlanError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, so it can't hold other ranks: "
            'call verify(ranks="process_group"), or destroy the process group first'
        )
