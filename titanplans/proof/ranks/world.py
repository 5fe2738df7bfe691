"""The ranks of a proof, behind one interface.

threads          titanplans/proof/ranks/threads.py: each rank is a thread of this process, on a CPU or one GPU
process_group    here: one rank in each process of the default process group, over gloo or NCCL
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from titanplans.adapters.low_rank import draws
from titanplans.errors import PlanError, either
from titanplans.proof.ranks import threads
from titanplans.split.gradients import local_of
from titanplans.split.objects import gather_objects

T = TypeVar("T")

RANKS = ("threads", "process_group")
SMALL = 2**27
"""Bytes of a model whose arithmetic does not fill two cores."""


class ProcessWorld:
    """The same as `ThreadWorld` on one rank in each process of the default process group, over gloo or NCCL.

    There an error of `together` stays on its rank, and the others wait until their timeout.
    """

    exact = False  # kernels that sum by atomic operations give each rank different bits
    asked: Collection[str] = ()

    def __init__(self, meshes: threads.Meshes):
        self.mesh, self.mesh_of = meshes(1), meshes
        self.first = dist.get_rank() == 0

    def gather(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        for tensor in tensors:  # one by one: together they may not fit into memory
            local = local_of(tensor).contiguous()
            shapes = self.gather_objects(local.shape)
            # Shards may differ in size; the collective takes one.
            flat = local.new_zeros(max(shape.numel() for shape in shapes))
            flat[: local.numel()] = local.flatten()
            gathered = [torch.empty_like(flat) for _ in shapes]
            dist.all_gather(gathered, flat)
            yield [one[: shape.numel()].view(shape) for one, shape in zip(gathered, shapes, strict=True)]

    def gather_objects(self, value: T) -> list[T]:
        return gather_objects(value)

    def together(self, work: Callable[[], T]) -> T:
        return work()


World = threads.ThreadWorld | ProcessWorld
"""The ranks over which a case is split, as one of them sees them."""


class Worlds:
    """The ranks of a proof of the whole `model` at every degree, until the context ends.

    Raises:
        PlanError: `ranks` is none of `RANKS`, or threads can't run on the device of `model`.
    """

    def __init__(self, ranks: str, model: nn.Module):
        self.ranks, self.model = ranks, model
        self.device = next(model.parameters()).device
        self._pool: threads.Pool | None = None
        if ranks not in RANKS:
            raise PlanError(f"ranks = {ranks!r}: {either(list(RANKS))}")
        if ranks == "threads" and self.device.type not in ("cpu", "cuda"):
            raise PlanError(
                f"ranks = 'threads' on {self.device}: threads run on a CPU or on one GPU of CUDA; use a process group"
            )

    def __enter__(self) -> "Worlds":
        # Threads take turns on small tensors: further cores cost more than they bring, and most on a busy machine.
        self._intra_op = torch.get_num_threads()
        self._drawn = [(one, one.get_state()) for one in threads.default_generators(self.device)]
        if self.ranks == "threads":
            if is_small(self.model, next(self.model.parameters()).dtype):
                torch.set_num_threads(1)
            self._pool = threads.Pool(self.device, drawing=draws(self.model)).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.__exit__()
        torch.set_num_threads(self._intra_op)
        for generator, state in self._drawn:  # each forward of a model that draws numbers begins with a seed
            generator.set_state(state)

    def run(self, degree: int, work: Callable[[Any], T], replica: int = 1) -> T:
        """Run `work` on every rank, and return its result on the first. `replica`: as for `threads.Pool`."""
        if self._pool is not None:
            return self._pool.run(degree, work, replica)
        world = ProcessWorld(threads.Meshes(self.device.type, range(degree)))
        return from_first(world, work(world))


def from_first(world: World, value: T) -> T:
    """Return the first rank's `value` on every rank."""
    return world.gather_objects(value)[0]


def wholes(tensors: Sequence[torch.Tensor], world: World) -> Iterator[list[torch.Tensor]]:
    """Yield each of `tensors` whole, plain and read-only: every rank's replica, or one tensor made of all shards.

    Every rank has to call this; only the first one's results are meant to be read.
    """
    summed = [
        t.full_tensor() if isinstance(t, DTensor) and any(p.is_partial() for p in t.placements) else t
        for t in tensors
    ]
    for tensor, held in zip(tensors, world.gather(summed), strict=True):
        yield _assembled(tensor, held) if isinstance(tensor, DTensor) and world.first else held


def _assembled(tensor: DTensor, held: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the replicas of `tensor`, whose local tensors on all ranks are `held`, each made whole of its shards."""
    mesh, ranks = tensor.device_mesh, len(held)
    if any(p.is_partial() for p in tensor.placements):
        return held
    names = mesh.mesh_dim_names if mesh.size() != ranks else None
    # Ranks that the mesh leaves out are replicas: those of "tp" for a mesh of "cp" alone.
    copies = ranks // mesh.size()
    assert names is None or names == ("cp",) or copies == 1
    parts = [held[copy::copies] for copy in range(copies)]
    for axis in reversed(range(mesh.ndim)):
        placement, size, made = tensor.placements[axis], mesh.size(axis), []
        for part in parts:
            rows = [part[at : at + size] for at in range(0, len(part), size)]
            if isinstance(placement, Shard):
                made.append([torch.cat(row, placement.dim) for row in rows])
            else:
                made += [[row[at] for row in rows] for at in range(size)]
        parts = made
    return [whole for part in parts for whole in part]


def is_small(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the arithmetic of `model` in `dtype` keeps no more than one core busy."""
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize <= SMALL


def group_size() -> int:
    """Return the number of ranks of the default process group.

    Raises:
        PlanError: there is none.
    """
    if not dist.is_initialized():
        raise PlanError(
            "ranks = 'process_group', but there is no process group: start under torchrun, or leave ranks out"
        )
    return dist.get_world_size()
