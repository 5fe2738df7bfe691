"""One interface to the ranks of a proof, which are threads (titanplans/proof/ranks/threads.py) or the processes of a group.

Start at `Worlds`.
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
"""A model of at most this many bytes does not keep two cores busy."""


class ProcessWorld:
    """The interface of `ThreadWorld` for the default process group, over gloo or NCCL, with one rank in each process.

    Unlike in a `ThreadWorld`, an error in `together` is raised only on the rank where it occurs, and the other ranks wait
    until their timeout.
    """

    exact = False  # kernels that sum with atomic operations give each rank different bits
    rank_queries: Collection[str] = ()

    def __init__(self, meshes: threads.Meshes):
        self.mesh, self.mesh_of = meshes(1), meshes
        self.is_first = dist.get_rank() == 0

    def gather(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        for tensor in tensors:  # one by one: together they may not fit into memory
            local = local_of(tensor).contiguous()
            shapes = self.gather_objects(local.shape)
            # Shards may differ in size, and all_gather needs equal sizes: pad to the largest.
            flat = local.new_zeros(max(shape.numel() for shape in shapes))
            flat[: local.numel()] = local.flatten()
            gathered = [torch.empty_like(flat) for _ in shapes]
            dist.all_gather(gathered, flat)
            yield [
                padded[: shape.numel()].view(shape) for padded, shape in zip(gathered, shapes, strict=True)
            ]

    def gather_objects(self, value: T) -> list[T]:
        return gather_objects(value)

    def together(self, work: Callable[[], T]) -> T:
        return work()


World = threads.ThreadWorld | ProcessWorld
"""One rank's view of the ranks over which a case is split."""


class Worlds:
    """Context manager that keeps the ranks of a proof at every degree. `model` is the unsplit model.

    On exit it restores torch's number of threads and the states of its default generators.

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
        self._intra_op_threads = torch.get_num_threads()
        self._generator_states = [(one, one.get_state()) for one in threads.default_generators(self.device)]
        if self.ranks == "threads":
            if is_small(self.model, next(self.model.parameters()).dtype):
                # On small tensors more cores cost more time than they save, above all on a busy machine.
                torch.set_num_threads(1)
            self._pool = threads.Pool(self.device, drawing=draws(self.model)).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.__exit__()
        torch.set_num_threads(self._intra_op_threads)
        # The proof seeds these generators before forwards that draw numbers.
        for generator, state in self._generator_states:
            generator.set_state(state)

    def run(self, degree: int, work: Callable[[Any], T], replica: int = 1) -> T:
        """Run `work` on every rank, and return its result on the first. `replica`: as in `threads.Pool.run`."""
        if self._pool is not None:
            return self._pool.run(degree, work, replica)
        world = ProcessWorld(threads.Meshes(self.device.type, range(degree)))
        return from_first(world, work(world))


def from_first(world: World, value: T) -> T:
    """Return the first rank's `value` on every rank."""
    return world.gather_objects(value)[0]


def full_tensors(tensors: Sequence[torch.Tensor], world: World) -> Iterator[list[torch.Tensor]]:
    """For each of `tensors`, yield its full tensors: one for each replica. Do not modify them.

    A DTensor is assembled from its shards. A plain tensor counts as replicated: the list has every rank's tensor. Every
    rank has to call this, and only the first rank's results are full.
    """
    summed = [
        t.full_tensor() if isinstance(t, DTensor) and any(p.is_partial() for p in t.placements) else t
        for t in tensors
    ]
    for tensor, gathered in zip(tensors, world.gather(summed), strict=True):
        yield _full_replicas(tensor, gathered) if isinstance(tensor, DTensor) and world.is_first else gathered


def _full_replicas(tensor: DTensor, gathered: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the full tensor of each replica of `tensor`; `gathered` has its local tensors by rank."""
    mesh, ranks = tensor.device_mesh, len(gathered)
    if any(p.is_partial() for p in tensor.placements):
        return gathered  # Partial tensors were summed before they were gathered
    names = mesh.mesh_dim_names if mesh.size() != ranks else None
    # Ranks outside of the tensor's mesh are replicas: the TP ranks, for a mesh of "cp" alone.
    replicas = ranks // mesh.size()
    assert names is None or names == ("cp",) or replicas == 1
    by_replica = [gathered[replica::replicas] for replica in range(replicas)]
    for axis in reversed(range(mesh.ndim)):  # the last dimension has consecutive ranks
        placement, size = tensor.placements[axis], mesh.size(axis)
        merged: list[list[torch.Tensor]] = []
        for shards in by_replica:
            groups = [shards[start : start + size] for start in range(0, len(shards), size)]
            if isinstance(placement, Shard):
                merged.append([torch.cat(group, placement.dim) for group in groups])
            else:
                merged += [[group[index] for group in groups] for index in range(size)]
        by_replica = merged
    return [full for replica in by_replica for full in replica]


def is_small(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether `model` in `dtype` is so small that its arithmetic keeps no more than one core busy."""
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize <= SMALL


def group_size() -> int:
    """Return the number of ranks of the default process group, or raise PlanError if there is none."""
    if not dist.is_initialized():
        raise PlanError(
            "ranks = 'process_group', but there is no process group: start under torchrun, or leave ranks out"
        )
    return dist.get_world_size()
