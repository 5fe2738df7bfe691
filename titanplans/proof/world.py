"""The ranks of a proof: one interface for the three places where they can be, and which is chosen.

    threads          titanplans/proof/threads.py: each rank a thread of this process
    simulated        titanplans/proof/simulate.py: every operation done once for each rank, in one thread
    process_group    here: one rank in each process of the default process group, over gloo or NCCL

Where nothing is said, threads are taken for a degree up to 16 of a model on a CPU whose copies, one a rank, take up
to 4 GiB together, and simulated ranks otherwise. Threads are several times as fast for small models, where simulated
ranks spend their time on dispatch, and they are real: a plan may ask which rank it is. Each thread begins with a
whole model, though, which simulated ranks share, and there the arithmetic of large ones costs the same.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titanplans.adapters.low_rank import draws
from titanplans.errors import PlanError, either
from titanplans.proof import simulate, threads

T = TypeVar("T")

RANKS = ("threads", "simulated", "process_group")
MOST_THREADS = 16
SMALL = 2**27
"""Bytes of a model whose arithmetic does not fill two cores."""

MOST_COPIES = 2**32
"""Bytes of parameters that all threads together begin with."""


class World(Protocol):
    """The ranks over which cases are split, as one of them sees them; simulated ranks are all seen as one."""

    name: str
    """threads, simulated or process_group."""

    mesh: DeviceMesh
    """1-D, "tp"."""

    first: bool
    """Whether this is the first rank, which compares for all."""

    ranked: bool
    """Code may ask which rank it is."""

    exact: bool
    """Equal work gives equal bits on every rank."""

    asked: Collection[str]
    """Python modules, but torch's and ours, that asked for a rank's number in a world larger than the mesh."""

    def settle(self, model: nn.Module) -> None:
        """Prepare a model that was just split."""
        ...

    def gather(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield of each of `tensors` the local one of every rank, in rank order, as plain tensors to be read."""
        ...

    def gather_objects(self, value: T) -> list[T]:
        """Return the `value` of every rank, in rank order; of simulated ranks, the one that all have."""
        ...

    def together(self, work: Callable[[], T]) -> T:
        """Return what `work` returns on this rank; what it raises on one rank is raised on all.

        Over a process group an error stays on its rank, and the others wait until their timeout.
        """
        ...


class Group:
    """One rank in each process of the default process group, over gloo or NCCL."""

    name = "process_group"
    # Kernels that sum with atomic operations give each rank bits of its own.
    exact = False
    ranked = True
    asked: Collection[str] = ()

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.first = dist.get_rank() == 0

    def settle(self, model: nn.Module) -> None:
        """Nothing to do: each process has its own memory."""

    def gather(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        for tensor in tensors:  # one after the other, since all of them may not fit into memory
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous()
            shapes = self.gather_objects(local.shape)
            # Ranks may hold shards of different sizes; the collective wants one.
            flat = local.new_zeros(max(shape.numel() for shape in shapes))
            flat[: local.numel()] = local.flatten()
            gathered = [torch.empty_like(flat) for _ in shapes]
            dist.all_gather(gathered, flat)
            yield [one[: shape.numel()].view(shape) for one, shape in zip(gathered, shapes, strict=True)]

    def gather_objects(self, value: T) -> list[T]:
        values = [value] * self.mesh.size()
        dist.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], T]) -> T:
        return work()


def run_group(degree: int, device: torch.device, work: Callable[[World], T]) -> T:
    """Run `work` on this rank of the default process group, which has `degree`; return what it returns on the first."""
    world = Group(init_device_mesh(device.type, (degree,), mesh_dim_names=("tp",)))
    return from_first(world, work(world))


class Worlds:
    """The ranks of a proof at every degree, until the context ends: those that are asked for, or else what fits.

    Args:
        ranks: threads, simulated, process_group or None.
        model: the whole one.
    """

    def __init__(self, ranks: str | None, model: nn.Module):
        self.ranks, self.model = ranks, model
        self.device = next(model.parameters()).device
        self._pool: threads.Pool | None = None

    def __enter__(self) -> "Worlds":
        # Ranks that are threads take turns, and their tensors are small: cores that help each of them cost more than
        # they bring, several times as much on a machine that has other work.
        self._intra_op, self._drawn = torch.get_num_threads(), torch.get_rng_state()
        dtype = next(self.model.parameters()).dtype
        if choose(self.ranks, 2, self.model) == "threads" and is_small(self.model, dtype):
            torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        torch.set_num_threads(self._intra_op)
        torch.set_rng_state(self._drawn)  # each forward of a model that draws begins with a seed

    def run(self, degree: int, work: Callable[[Any], T], replica: int = 1) -> T:
        """Run `work` on every rank, and return what it returns on the first. `replica`: as for `threads.Pool`."""
        ranks = choose(self.ranks, degree, self.model)
        if ranks == "threads":
            if self._pool is None:
                self._pool = threads.Pool(self.device, drawing=draws(self.model)).__enter__()
            return self._pool.run(degree, work, replica)
        self._close()
        return (run_group if ranks == "process_group" else simulate.run)(degree, self.device, work)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.__exit__()
            self._pool = None


def from_first(world: World, value: T) -> T:
    """Return the first rank's `value` on every rank."""
    return world.gather_objects(value)[0]


def wholes(tensors: Sequence[torch.Tensor], world: World) -> Iterator[list[torch.Tensor]]:
    """Yield each of `tensors` whole, as plain tensors to be read: every rank's replica, or the one that its shards make.

    Every rank has to ask, and the first one gets them; the others get what they need not read.
    """
    summed = [
        t.full_tensor() if isinstance(t, DTensor) and t.placements[0].is_partial() else t for t in tensors
    ]
    for tensor, held in zip(tensors, world.gather(summed), strict=True):
        placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
        yield [torch.cat(held, placement.dim)] if isinstance(placement, Shard) and world.first else held


def choose(ranks: str | None, degree: int, model: nn.Module) -> str:
    """Return which ranks prove `degree` of `model`: those that are asked for, or else as this module says.

    Raises:
        PlanError: there are no such ranks, or threads can't prove this.
    """
    device = next(model.parameters()).device
    if ranks not in (None, *RANKS):
        raise PlanError(f"ranks = {ranks!r}: {either(list(RANKS))}, or None for what fits")
    if ranks == "threads" and device.type != "cpu":
        raise PlanError(
            f"ranks = 'threads' on {device}: threads meet on a CPU; take simulated ranks, or a process group"
        )
    if ranks is not None:
        return ranks
    copies = degree * sum(p.numel() * p.element_size() for p in model.parameters())
    fits = device.type == "cpu" and degree <= MOST_THREADS and copies <= MOST_COPIES
    return "threads" if fits else "simulated"


def is_small(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the arithmetic of `model` in `dtype` keeps no more than one core busy."""
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize <= SMALL


def group_degree(degrees: Sequence[int] | None) -> int:
    """Return the only degree that the default process group can prove: its size.

    Raises:
        PlanError: there is no process group, or another degree was asked for.
    """
    if not dist.is_initialized():
        raise PlanError(
            "ranks = 'process_group', but there is no process group: start under torchrun, or leave ranks out"
        )
    size = dist.get_world_size()
    if degrees is not None and tuple(degrees) != (size,):
        raise PlanError(
            f"degrees = {', '.join(map(str, degrees))}, but the process group has {size} ranks and proves degree "
            f"{size} only: start as many processes as the degree, or leave ranks out"
        )
    return size
