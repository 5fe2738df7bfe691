"""A mesh of ranks that do not exist, on torch's fake process group, for code that needs a mesh but no communication."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanplans.errors import PlanError
from titanplans.torch_private.distributed import fake_store
from titanplans.torch_private.dtensor import clear_sharding_cache


@contextmanager
def fake_ranks(count: int, cp: int = 1, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """Yield a mesh of `count` ranks: ("tp",) for `cp` = 1, else ("cp", "tp").

    This process is rank 0, and the other ranks do not exist. Collectives return tensors of the right shape with arbitrary
    values.

    Raises:
        PlanError: this process is a rank already.
    """
    refuse_existing_group()
    dist.init_process_group("fake", rank=0, world_size=count, store=fake_store())
    try:
        # DTensor caches shardings by mesh. An earlier mesh of the same shape compares equal, although its group no longer
        # exists.
        clear_sharding_cache()
        sizes = mesh_sizes(count, cp)
        yield init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()


def mesh_sizes(ranks: int, cp: int) -> dict[str, int]:
    """Return the sizes, by name, of a mesh of `ranks`: "tp" for `cp` = 1, else "cp" and "tp"."""
    return {"tp": ranks} if cp == 1 else {"cp": cp, "tp": ranks // cp}


def refuse_existing_group() -> None:
    """Raise PlanError if this process is a rank already, because the default process group exists."""
    if dist.is_initialized():
        raise PlanError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, so it can't hold other ranks: "
            'call verify(ranks="process_group"), or destroy the process group first'
        )
