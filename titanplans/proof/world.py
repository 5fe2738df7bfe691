"""Where the ranks of a proof are: in this process, simulated, or in a process group. One interface for both."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from titanplans.errors import PlanError
from titanplans.proof.simulate import each_rank, own_copies, ranks

T = TypeVar("T")


class World(Protocol):
    """The ranks over which one case is split."""

    mesh: DeviceMesh
    """1-D, "tp"."""

    exact: bool
    """Equal work gives equal bits on every rank."""

    def settle(self, model: nn.Module) -> None:
        """Prepare a model that was just split."""
        ...

    def every(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the local tensor of every rank, in rank order, as plain tensors."""
        ...

    def agreed(self, value: T) -> T:
        """Return the first rank's `value` on every rank."""
        ...


class Simulated:
    """All ranks in this process."""

    exact = True

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh

    def settle(self, model: nn.Module) -> None:
        own_copies(model, self.mesh.size())

    def every(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return each_rank(_local(tensor), self.mesh.size())

    def agreed(self, value: T) -> T:
        return value


class Group:
    """One rank in each process of the default process group, over gloo or NCCL."""

    # Kernels that sum with atomic operations give each rank bits of its own.
    exact = False

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh

    def settle(self, model: nn.Module) -> None:
        """Nothing to do: each process has its own memory."""

    def every(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        local = _local(tensor).contiguous()
        shapes: list[torch.Size] = [local.shape] * self.mesh.size()
        dist.all_gather_object(shapes, local.shape)
        # Ranks may hold shards of different sizes; the collective wants one.
        flat = local.new_zeros(max(shape.numel() for shape in shapes))
        flat[: local.numel()] = local.flatten()
        gathered = [torch.empty_like(flat) for _ in shapes]
        dist.all_gather(gathered, flat)
        return [one[: shape.numel()].view(shape) for one, shape in zip(gathered, shapes, strict=True)]

    def agreed(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wholes(tensor: torch.Tensor, world: World) -> list[torch.Tensor]:
    """Return `tensor` whole, as plain tensors: each rank's replica, or the one that its shards make."""
    if isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements):
        return [_first(tensor.full_tensor())]  # gathered or summed: every rank has the same
    return world.every(tensor)


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return each_rank(tensor, 1)[0]


@contextmanager
def simulated(degree: int, device: torch.device) -> Iterator[World]:
    """Give a world of `degree` simulated ranks."""
    with ranks(degree, device.type) as mesh:
        yield Simulated(mesh)


@contextmanager
def grouped(degree: int, device: torch.device) -> Iterator[World]:
    """Give the world of the default process group, which has `degree` ranks."""
    yield Group(init_device_mesh(device.type, (degree,), mesh_dim_names=("tp",)))


def group_degree(degrees: Sequence[int] | None) -> int:
    """Return the only degree that the default process group can prove: its size.

    Raises:
        PlanError: there is no process group, or another degree was asked for.
    """
    if not dist.is_initialized():
        raise PlanError(
            "process_group=True, but there is no process group: start under torchrun, or simulate"
        )
    size = dist.get_world_size()
    if degrees is not None and tuple(degrees) != (size,):
        raise PlanError(
            f"degrees = {', '.join(map(str, degrees))}, but the process group has {size} ranks and proves degree "
            f"{size} only: start as many processes as the degree, or simulate"
        )
    return size
