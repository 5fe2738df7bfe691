"""Many ranks in one process: a mesh of simulated ranks, and what each of them holds.

`torch.distributed._local_tensor.LocalTensorMode` runs every operation once for each rank, and
collectives on the tensors of all. Its rough edges are kept inside this file.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanplans.errors import PlanError
from titanplans.proof.modes import by_rank


@contextmanager
def ranks(number: int, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """Give a 1-D mesh "tp" of `number` simulated ranks; tensors made under it are one per rank.

    Modules that cache tensors at their first forward (rotary tables) must not have run outside, nor
    run again afterwards: deep-copy a model that never ran.

    Raises:
        PlanError: this process is a rank already.
    """
    with _fake_group(number), LocalTensorMode(number), by_rank():
        yield init_device_mesh(device_type, (number,), mesh_dim_names=("tp",))


@contextmanager
def fake_ranks(number: int, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """Give a 1-D mesh "tp" of `number` ranks of which this process is the first, and the others do not exist.

    What a collective returns has the right shape and arbitrary values.

    Raises:
        PlanError: this process is a rank already.
    """
    with _fake_group(number):
        yield init_device_mesh(device_type, (number,), mesh_dim_names=("tp",))


@contextmanager
def _fake_group(number: int) -> Iterator[None]:
    if dist.is_initialized():
        raise PlanError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, so it can't simulate "
            "ranks: call verify(process_group=True), or destroy the process group first"
        )
    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        # DTensor remembers shardings by mesh, and takes a mesh of the same shape for the same one,
        # with a process group that is gone.
        _clear_sharding_prop_cache()
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


def each_rank(tensor: torch.Tensor, number: int) -> list[torch.Tensor]:
    """Return what each simulated rank holds of the local `tensor`, as plain tensors."""
    if isinstance(tensor, LocalTensor):
        return [tensor._local_tensors[rank] for rank in range(number)]
    return [tensor] * number  # made outside the mode: the same on every rank


def own_copies(model: nn.Module, number: int) -> None:
    """Give each simulated rank its own copy of every replicated parameter of a split `model`.

    `distribute_tensor` leaves a replica one plain tensor: an update in place would be done to it once
    for each rank, and ranks could never differ.
    """
    for param in model.parameters():
        if isinstance(param, DTensor) and not isinstance(param._local_tensor, LocalTensor):
            copies = {rank: param._local_tensor.detach().clone() for rank in range(number)}
            param._local_tensor = LocalTensor(copies)
