"""Ranks that are threads of this process, with real local tensors and real collectives. Start at `Pool`.

One rank runs at a time, from one collective to the next, in rank order. So global state of the process is never half
changed, runs are reproducible, and a rank that fails ends the other ranks at their next collective. Each thread has its own
autograd, grad mode and function modes, and for a model with dropout its own state of the default generator. All other
global state is shared.

The world is a job with two data-parallel replicas, and the threads are the ranks of one of them, by default the second:
at degree 2 they are ranks 2 and 3 of 4. So `dist.get_rank()` differs from the rank in the mesh, and the default group
differs from the mesh's group (titanplans/proof/ranks/thread_groups.py). A plan that confuses them fails.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanplans.proof.ranks.fake import mesh_sizes, refuse_existing_group
from titanplans.proof.ranks.lockstep import Lockstep, RankStopped
from titanplans.proof.ranks.thread_groups import ThreadGroup, note_rank_queries
from titanplans.split.gradients import local_of
from titanplans.torch_private.threads import groups_of_threads, meshes_by_thread, shared_shardings

T = TypeVar("T")


class ThreadWorld:
    """One rank's view of the ranks over which a case is split.

    Attributes:
        mesh: 1-D, "tp": all ranks.
        mesh_of: `mesh_of(cp)` and `mesh_of.of_experts(ep)` return meshes of the same ranks.
        is_first: whether this is the first rank. It compares the tensors for all ranks.
        rank_queries: Python modules, other than torch's and ours, that called `dist.get_rank()`.
    """

    exact: bool
    """Whether the same work gives the same bits on every rank. False on a GPU, where kernels sum with atomic
    operations."""

    def __init__(self, meshes: "Meshes", rank: int, lockstep: Lockstep):
        self.exact = meshes.device_type == "cpu"
        self.mesh, self.mesh_of, self._rank, self._lockstep = meshes(1), meshes, rank, lockstep
        self.is_first = rank == 0
        self.rank_queries: Collection[str] = lockstep.rank_queries

    def gather(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """For each of `tensors`, yield all ranks' local tensors in rank order. Do not modify them: they are not copies."""
        local = [local_of(tensor).detach() for tensor in tensors]
        what = ("gather", ("tensors", len(local)))
        return map(
            list, self._lockstep(self._rank, what, local, lambda values: list(zip(*values, strict=True)))
        )

    def gather_objects(self, value: T) -> list[T]:
        """Return the `value` of every rank, in rank order."""
        return self._lockstep(self._rank, ("gather_objects",), value, lambda values: values)

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on this rank; an error on one rank is raised on all ranks."""
        return self._lockstep.together(self._rank, work)


class Pool:
    """Context manager that keeps one set of threads, which act as ranks, for each degree and replica.

    Args:
        device: the CPU, or one GPU that all ranks share.
        drawing: the model draws random numbers, so each rank keeps its own state of the default generators.
    """

    def __init__(self, device: torch.device, *, drawing: bool = False):
        self.device, self._generators = device, default_generators(device) if drawing else []
        # The threads are kept between calls, since torch caches the sharding of DTensors by thread and by mesh.
        self._worlds: dict[tuple[int, int], _RankThreads] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Pool":
        refuse_existing_group()
        self._stack.enter_context(groups_of_threads())
        self._stack.enter_context(shared_shardings())
        self._stack.enter_context(meshes_by_thread())
        self._stack.enter_context(note_rank_queries())
        return self

    def __exit__(self, *_: object) -> None:
        for ranks in self._worlds.values():
            ranks.close()
        self._stack.close()

    def run(self, degree: int, work: Callable[[ThreadWorld], T], replica: int = 1) -> T:
        """Run `work` on each of `degree` threads, and return its result on the first.

        Args:
            degree: number of ranks.
            work: is called with each rank's world.
            replica: the data-parallel replica (0 or 1) whose ranks the threads are.

        Raises:
            Exception: from `work` on the first rank that fails.
            RanksDiverged: the ranks called different collectives.
        """
        if (degree, replica) not in self._worlds:
            self._worlds[degree, replica] = _RankThreads(degree, replica, self.device, self._generators)
        return self._worlds[degree, replica].run(work)


class _RankThreads:
    """The threads of one degree and replica; each waits for work in its queue."""

    def __init__(
        self, degree: int, replica: int, device: torch.device, generators: Sequence[torch.Generator]
    ):
        self.degree, self.replica, self.device, self.generators = degree, replica, device, generators
        self._work: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(degree)]
        self._results: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        """For each rank that has finished: the rank, the result of its work, and its error."""
        # The threads are daemons, so that an interrupted process ends even if they wait.
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in range(degree)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[ThreadWorld], T]) -> T:
        lockstep = Lockstep(self.degree, self.replica, generators=self.generators)
        ThreadGroup.lockstep = lockstep
        for queue in self._work:
            queue.put((work, lockstep))
        try:
            results = [self._results.get() for _ in range(self.degree)]
        except BaseException:  # an interrupt: end the ranks first
            lockstep.stop()
            self.close()
            raise
        errors = [error for _, _, error in results if error is not None]
        if errors:
            raise errors[0]
        return next(result for rank, result, _ in results if rank == 0)

    def close(self) -> None:
        for queue in self._work:
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, rank: int) -> None:
        dist.init_process_group(
            "titanplans_threads",
            rank=self.replica * self.degree + rank,
            world_size=2 * self.degree,
            store=dist.HashStore(),
        )
        meshes: Meshes | None = None

        def work_in_world(work: Callable[[ThreadWorld], Any], lockstep: Lockstep) -> Any:
            nonlocal meshes
            if meshes is None:  # here, because making a mesh calls collectives
                meshes = Meshes(self.device.type, lockstep.global_ranks)
            return work(ThreadWorld(meshes, rank, lockstep))

        while (job := self._work[rank].get()) is not None:
            work, lockstep = job
            result, failure = None, None
            try:
                lockstep.wait(rank)
                # Let a backward run on the thread that called it. Otherwise autograd runs it on one thread per GPU,
                # which would be the same for all ranks.
                with torch.autograd.set_multithreading_enabled(False):
                    result = lockstep.together(rank, partial(work_in_world, work, lockstep))
            except RankStopped:
                pass
            except BaseException as error:  # noqa: BLE001 -- raised again in the caller's thread
                failure = error
            lockstep.hand_over(rank)
            self._results.put((rank, result, failure))
        dist.destroy_process_group()


class Meshes:
    """The device meshes over the global `ranks`, each made at its first use and kept."""

    def __init__(self, device_type: str, ranks: Sequence[int]):
        self.device_type, self.ranks = device_type, ranks
        self._meshes: dict[tuple[str, int], DeviceMesh] = {}

    def __call__(self, cp: int) -> DeviceMesh:
        """Return the mesh ("tp",) for `cp` = 1, else ("cp", "tp")."""
        return self._mesh("", cp, mesh_sizes(len(self.ranks), cp))

    def of_experts(self, ep: int) -> DeviceMesh:
        """Return the mesh ("ep",) if `ep` is the number of ranks, else ("efsdp", "ep") with replicas in "efsdp"."""
        replicas = len(self.ranks) // ep
        return self._mesh("ep", ep, {"efsdp": replicas, "ep": ep} if replicas > 1 else {"ep": ep})

    def _mesh(self, kind: str, degree: int, sizes: dict[str, int]) -> DeviceMesh:
        if (kind, degree) not in self._meshes:
            grid = torch.tensor(self.ranks).view(*sizes.values())
            self._meshes[kind, degree] = DeviceMesh(self.device_type, grid, mesh_dim_names=tuple(sizes))
        return self._meshes[kind, degree]


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's default generator of the CPU, and of `device` if it is a GPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def run(degree: int, device: torch.device, work: Callable[[ThreadWorld], T]) -> T:
    """Run `work` on each of `degree` threads, and return its result on the first. A `Pool` for one call.

    Raises:
        PlanError: this process is a rank already.
        Exception: as in `Pool.run`.
    """
    with Pool(device) as pool:
        return pool.run(degree, work)
