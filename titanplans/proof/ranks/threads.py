"""Ranks that are threads of this process: real local tensors and real collectives, without processes.

One rank runs at a time, from one collective to the next, in the order of the ranks. So global state of the process is
never half changed, runs are reproducible, and a rank that fails ends the others at their next collective. Each thread has
its own autograd, grad mode and function modes, and for a model with dropout its own state of the default generator; all
other global state is shared.

The world is a job with two data-parallel replicas, and the threads are one of them, by default the second: at degree 2
they are ranks 2 and 3 of 4. So `dist.get_rank()` differs from a rank's number in the mesh, and the default group from the
mesh's (titanplans/proof/ranks/thread_groups.py).
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

from titanplans.proof.ranks.fake import mesh_sizes, refuse_a_rank
from titanplans.proof.ranks.lockstep import Lockstep, RankStopped
from titanplans.proof.ranks.thread_groups import ThreadGroup, asking_noted
from titanplans.split.gradients import local_of
from titanplans.torch_private.threads import groups_of_threads, meshes_by_thread, shared_shardings

T = TypeVar("T")


class ThreadWorld:
    """The ranks over which a case is split, as one of them sees them.

    Attributes:
        mesh: 1-D, "tp": all ranks.
        mesh_of: the meshes of the same ranks with so many of them sharing a sequence, or experts.
        first: whether this is the first rank, which compares for all.
        asked: Python modules, other than torch's and ours, that asked for a rank's number in a world larger than the mesh.
    """

    exact: bool
    """Equal work gives equal bits on every rank; not on a GPU, where kernels sum by atomic operations."""

    def __init__(self, meshes: "Meshes", rank: int, lockstep: Lockstep):
        self.exact = meshes.device_type == "cpu"
        self.mesh, self.mesh_of, self._rank, self._lockstep = meshes(1), meshes, rank, lockstep
        self.first = rank == 0
        self.asked: Collection[str] = lockstep.asked

    def gather(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield for each of `tensors` every rank's local tensor, in rank order, plain and read-only."""
        parts = [local_of(tensor).detach() for tensor in tensors]
        what = ("gather", ("tensors", len(parts)))
        return map(
            list, self._lockstep(self._rank, what, parts, lambda values: list(zip(*values, strict=True)))
        )

    def gather_objects(self, value: T) -> list[T]:
        """Return the `value` of every rank, in rank order."""
        return self._lockstep(self._rank, ("gather_objects",), value, lambda values: values)

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on this rank; an error on one rank is raised on all."""
        return self._lockstep.together(self._rank, work)


class Pool:
    """Threads that are ranks, one world of them for each degree, until the context ends.

    A world is kept: torch caches the sharding of DTensors by thread and by mesh.

    Args:
        device: of the meshes: the CPU, or one GPU that all ranks share.
        drawing: whether each rank has its own states of the default generators, as in a process.
    """

    def __init__(self, device: torch.device, *, drawing: bool = False):
        self.device, self._generators = device, default_generators(device) if drawing else []
        self._worlds: dict[tuple[int, int], _Ranks] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Pool":
        refuse_a_rank()
        self._stack.enter_context(groups_of_threads())
        self._stack.enter_context(shared_shardings())
        self._stack.enter_context(meshes_by_thread())
        self._stack.enter_context(asking_noted())
        return self

    def __exit__(self, *_: object) -> None:
        for ranks in self._worlds.values():
            ranks.close()
        self._stack.close()

    def run(self, degree: int, work: Callable[[ThreadWorld], T], replica: int = 1) -> T:
        """Run `work` on each of `degree` threads, replica 0 or 1 of the world, and return its result on the first.

        Raises:
            Exception: from `work` on the first rank to fail; `RanksDiverged` if the ranks lost each other.
        """
        if (degree, replica) not in self._worlds:
            self._worlds[degree, replica] = _Ranks(degree, replica, self.device, self._generators)
        return self._worlds[degree, replica].run(work)


class _Ranks:
    """The threads of one world; each waits for work."""

    def __init__(
        self, degree: int, replica: int, device: torch.device, generators: Sequence[torch.Generator]
    ):
        self.degree, self.replica, self.device, self.generators = degree, replica, device, generators
        self._work: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(degree)]
        self._ended: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        # Daemons: an interrupted process ends, whatever they wait for.
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
            ended = [self._ended.get() for _ in range(self.degree)]
        except BaseException:  # an interrupt: the ranks end before it goes on
            lockstep.stop()
            self.close()
            raise
        errors = [error for _, _, error in ended if error is not None]
        if errors:
            raise errors[0]
        return next(result for rank, result, _ in ended if rank == 0)

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

        def act(work: Callable[[ThreadWorld], Any], lockstep: Lockstep) -> Any:
            nonlocal meshes
            if meshes is None:
                meshes = Meshes(self.device.type, lockstep.in_world)
            return work(ThreadWorld(meshes, rank, lockstep))

        while (job := self._work[rank].get()) is not None:
            work, lockstep = job
            result, failure = None, None
            try:
                lockstep.wait(rank)
                # A backward runs on the thread that called it, also on a GPU, where one thread would serve all ranks.
                with torch.autograd.set_multithreading_enabled(False):
                    result = lockstep.together(rank, partial(act, work, lockstep))
            except RankStopped:
                pass
            except BaseException as error:  # noqa: BLE001 -- raised again in the caller's thread
                failure = error
            lockstep.hand_over(rank)
            self._ended.put((rank, result, failure))
        dist.destroy_process_group()


class Meshes:
    """The meshes of some ranks of the world, made once each, by the number of those that share a sequence."""

    def __init__(self, device_type: str, ranks: Sequence[int]):
        self.device_type, self.ranks = device_type, ranks
        self._made: dict[tuple[str, int], DeviceMesh] = {}

    def __call__(self, cp: int) -> DeviceMesh:
        """Return the mesh "tp", or "cp" and "tp", with so many ranks in "cp"."""
        return self._mesh("", cp, mesh_sizes(len(self.ranks), cp))

    def of_experts(self, ranks: int) -> DeviceMesh:
        """Return the mesh "ep" of neighbours that share experts, behind a dimension of copies where there are more ranks."""
        copies = len(self.ranks) // ranks
        return self._mesh("ep", ranks, {"efsdp": copies, "ep": ranks} if copies > 1 else {"ep": ranks})

    def _mesh(self, kind: str, number: int, shape: dict[str, int]) -> DeviceMesh:
        if (kind, number) not in self._made:
            grid = torch.tensor(self.ranks).view(*shape.values())
            self._made[kind, number] = DeviceMesh(self.device_type, grid, mesh_dim_names=tuple(shape))
        return self._made[kind, number]


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's default generators: the CPU's, and that of `device` if it is a GPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def run(degree: int, device: torch.device, work: Callable[[ThreadWorld], T]) -> T:
    """Run `work` on each of `degree` threads, and return its result on the first: a `Pool` for one call.

    Raises:
        PlanError: this process is a rank already.
        Exception: as `Pool.run`.
    """
    with Pool(device) as pool:
        return pool.run(degree, work)
