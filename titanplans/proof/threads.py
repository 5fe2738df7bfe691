"""Ranks that are threads of this process: real local tensors and real collectives, without processes.

One rank runs at a time, from one collective to the next, in the order of the ranks. So what is global in a
process is never seen half done, runs are reproducible, and a rank that fails ends the others: they leave their
work at their next collective instead of waiting for it. Each thread has autograd, grad mode and function modes
of its own; what is one for the process, as the default random generator, is shared by all ranks.

The world is that of a job with two data-parallel replicas, and the threads are one of them, the second if nothing is said:
at degree 2 they are ranks 2 and 3 of 4. So `dist.get_rank()` is no rank's number in the mesh, and the default group is not
the mesh's. The ranks of the other replica have no threads: what would wait for them is refused.
"""

import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanplans.proof.simulate import refuse_a_rank
from titanplans.torch_private import groups_of_threads, know_by_thread
from titanplans.torch_private import threaded_groups as threaded

T = TypeVar("T")
_END = "the end of its work"


class Apart(RuntimeError):
    """The ranks lost each other: they called different collectives, or one on tensors that don't match."""


class _Left(BaseException):
    """Ends a rank's work because another rank's has failed. No `Exception`, so that models let it pass."""


class Meeting:
    """Where the ranks wait for each other, and hand over to the next."""

    def __init__(self, ranks: int, replica: int):
        self.ranks = ranks
        self.in_world = list(range(replica * ranks, (replica + 1) * ranks))
        """The ranks' numbers in the world."""
        self.asked: dict[str, None] = {}
        """Python modules, but torch's and ours, that asked for a rank's number in the world."""
        self._turns = [threading.Semaphore(0) for _ in range(ranks)]
        self._turns[0].release()
        self._brought: dict[int, tuple[Any, Any, Callable]] = {}
        self._depths = [0] * ranks
        self._failure: BaseException | None = None
        self._result: Any = None
        self._shallowest: int | None = None
        """Where all ranks are at the end of a `together`: the depth of the outermost."""
        self._ended = False
        self._stopped = False

    def __call__(self, rank: int, what: tuple, value: Any, act: Callable[[list], Any]) -> Any:
        """Bring `value`, wait for the other ranks, and return what `act` makes of all values, in rank order.

        Ranks that bring another `what` have lost each other, which is the failure of all.
        """
        self._arrive(rank, what, value, act)
        if self._failure is not None:
            raise _Left
        return self._result

    def together(self, rank: int, work: Callable[[], T]) -> T:
        """Return what `work` returns on this rank, or raise on every rank what it raised on the first to fail."""
        self._depths[rank] += 1
        result = None
        try:
            result = work()
        except _Left:
            if self._stopped:
                raise
        except BaseException as error:  # noqa: BLE001 -- raised again below, on every rank
            self._failure = self._failure or error
        finally:
            self._depths[rank] -= 1
        if (failure := self._end(rank, self._depths[rank])) is not None:
            raise failure
        return result  # type: ignore[return-value]

    def wait(self, rank: int) -> None:
        """Wait for this rank's turn."""
        self._turns[rank].acquire()
        if self._stopped:
            raise _Left

    def hand_over(self, rank: int) -> None:
        """Let the next rank run."""
        self._turns[(rank + 1) % self.ranks].release()

    def stop(self) -> None:
        """End every rank's work at its next collective."""
        self._stopped = True
        for turn in self._turns:
            turn.release()

    def _end(self, rank: int, depth: int) -> BaseException | None:
        """Wait until every rank has ended its work; return the failure of any."""
        while True:
            self._arrive(rank, (_END, depth), None, lambda values: None)
            if self._ended:
                return self._result
            if self._shallowest is not None and self._shallowest < depth:
                raise _Left  # the others have left this work for good

    def _arrive(self, rank: int, what: tuple, value: Any, act: Callable[[list], Any]) -> None:
        self._brought[rank] = what, value, act
        if len(self._brought) == self.ranks:
            self._settle([self._brought[r] for r in range(self.ranks)])
            self._brought.clear()
        self.hand_over(rank)
        self.wait(rank)

    def _settle(self, brought: list[tuple[Any, Any, Callable]]) -> None:
        """Do what all ranks came for. Called by the last to arrive; what it leaves is read before the next time."""
        whats = [what for what, _, _ in brought]
        ends = [what[1] for what in whats if what[0] == _END]
        alike = all(what == whats[0] for what in whats)
        self._ended = alike and bool(ends)
        self._shallowest = min(ends) if len(ends) == self.ranks else None
        if self._ended:
            self._result, self._failure = self._failure, None
        elif self._failure is None and not alike:
            self._failure = Apart(
                "the ranks called different collectives: "
                + "; ".join(f"rank {rank} {_words(what)}" for rank, what in enumerate(whats))
            )
        elif self._failure is None:
            try:
                with torch.no_grad():
                    self._result = brought[0][2]([value for _, value, _ in brought])
            except RuntimeError as error:  # of torch: tensors that the collective can't take
                self._failure = Apart(f"{_words(whats[0])}: {error}")


def _words(what: tuple) -> str:
    return _END if what[0] == _END else ", ".join(what)


class _ThreadGroup(threaded.ProcessLocalGroup):
    """torch's process group of threads, whose ranks meet at `meeting`, where those that disagree are found out."""

    meeting: Meeting

    def __init__(self, rank: int, size: int, in_world: list[int]):
        super().__init__(rank, size)
        self.in_world = in_world
        """Its ranks' numbers in the world; none for the default group."""

    def _meet(self, collective: Any, tensors: Any, value: Any) -> Any:
        name = type(collective).__name__
        if self.in_world != self.meeting.in_world and (self.in_world or not _goes_over_all(collective)):
            self._refuse(name)
        shapes = [f"{tuple(t.shape)} {t.dtype}" for t in threaded.flatten_list(tensors)]
        settings = [f"{key} = {setting}" for key, setting in vars(collective).items()]
        self.meeting(self._rank % self.meeting.ranks, (name, *settings, *shapes), value, collective.work)
        return threaded.ret_work(value)

    def _refuse(self, name: str) -> NoReturn:
        called = f"{_caller()} called {name} on "
        if self.in_world and set(self.in_world) <= set(self.meeting.in_world):
            raise RuntimeError(
                f"{called}a group of {self.size()} of the mesh's {self.meeting.ranks} ranks, and ranks that are threads "
                "meet all together: take one process a rank, under torchrun (--process-group)"
            )
        group = (
            f"the group of ranks {', '.join(map(str, self.in_world))}"
            if self.in_world
            else "the default group"
        )
        raise RuntimeError(
            f"{called}{group}, in which other data-parallel ranks are, too: use the mesh's group, mesh.get_group()"
        )

    def barrier(self, opts=None):  # type: ignore[override]
        return self._meet(_Barrier(), (), None)

    def allreduce(self, tensors, opts):  # type: ignore[override]
        return self._meet(threaded.AllReduce(opts.reduceOp), tensors, tensors)

    allreduce_coalesced = allreduce  # type: ignore[assignment]

    def broadcast(self, tensors, opts):  # type: ignore[override]
        return self._meet(threaded.Broadcast(opts.rootRank), tensors, tensors)

    def scatter(self, outputs, inputs, opts):  # type: ignore[override]
        return self._meet(threaded.Scatter(opts.rootRank), outputs, (outputs, inputs))

    def gather(self, outputs, inputs, opts):  # type: ignore[override]
        return self._meet(threaded.Gather(opts.rootRank), inputs, (outputs, inputs))

    def allgather(self, outputs, inputs, opts=None):  # type: ignore[override]
        return self._meet(threaded.AllGather(), inputs, (outputs, inputs))

    def reduce_scatter(self, outputs, inputs, opts):  # type: ignore[override]
        return self._meet(threaded.ReduceScatter(opts.reduceOp.op), outputs, (outputs, inputs))

    def alltoall(self, outputs, inputs, opts=None):  # type: ignore[override]
        return self._meet(threaded.AllToAll(), (), (outputs, inputs))

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts=None):  # type: ignore[override]
        return self._meet(threaded.AllToAllBase(), (), (output, input, output_sizes, input_sizes))


def _running() -> Iterator[str]:
    """Yield the names of the Python modules whose code runs on this thread, but the proof's, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"] != threading.__name__:
        if not (name := frame.f_globals["__name__"]).startswith("titanplans.proof."):
            yield name
        frame = frame.f_back


def _caller() -> str:
    """Return who called torch: a Python module, or, where none but torch is running, the backward."""
    return next((name for name in _running() if name.partition(".")[0] != "torch"), "the backward")


def _goes_over_all(collective: Any) -> bool:
    """Whether ranks with no threads may be left out of what is called on the default group.

    That is a barrier, and torch's question to all of the world if DTensors are equal, which a right replica answers as the
    others do.
    """
    if isinstance(collective, _Barrier):
        return True
    asks = next(name for name in _running() if name not in _COLLECTIVES)
    return asks.startswith("torch.distributed.tensor.")


class _Barrier:
    def work(self, data: list) -> None:
        """Nothing: they have met."""


_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.overrides")


@contextmanager
def _asking_noted() -> Iterator[None]:
    """Note who asks `dist.get_rank()`: it may do one thing in one replica, and another thing in the other."""
    own = dist.get_rank

    def get_rank(group: dist.ProcessGroup | None = None) -> int:
        who = next(_running())
        if group is None and who.partition(".")[0] not in ("torch", "titanplans"):
            _ThreadGroup.meeting.asked[who] = None
        return own(group)

    dist.get_rank = get_rank
    try:
        yield
    finally:
        dist.get_rank = own


dist.Backend.register_backend(
    "titanplans_threads",
    lambda options, _: _ThreadGroup(options.group_rank, options.group_size, options.global_ranks_in_group),
    extended_api=True,
    devices=["cpu"],
)


class Thread:
    """The world (titanplans/proof/world.py) as one of the threads sees it."""

    name = "threads"
    exact = ranked = True

    def __init__(self, mesh: DeviceMesh, rank: int, meeting: Meeting):
        self.mesh, self._rank, self._meeting = mesh, rank, meeting
        self.first = rank == 0
        self.asked: Collection[str] = meeting.asked

    def settle(self, model: nn.Module) -> None:
        """Nothing to do: each thread has a model of its own."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return self._meeting(self._rank, ("gather",), local.detach(), lambda values: values)

    def gather_objects(self, value: T) -> list[T]:
        return self._meeting(self._rank, ("gather_objects",), value, lambda values: values)

    def together(self, work: Callable[[], T]) -> T:
        return self._meeting.together(self._rank, work)


class Pool:
    """Threads that are ranks, a world of them for each degree that was asked for, until the context ends.

    A world is kept, since torch remembers by thread and by mesh how DTensors are sharded.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._worlds: dict[tuple[int, int], _Ranks] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Pool":
        refuse_a_rank()
        self._stack.enter_context(groups_of_threads())
        self._stack.enter_context(_asking_noted())
        return self

    def __exit__(self, *_: object) -> None:
        for ranks in self._worlds.values():
            ranks.close()
        self._stack.close()

    def run(self, degree: int, work: Callable[[Thread], T], replica: int = 1) -> T:
        """Run `work` on each of `degree` threads, and return what it returns on the first.

        Args:
            degree: number of ranks.
            work: of each rank.
            replica: which of the world's two the ranks are, 0 or 1.

        Raises:
            Exception: what `work` raised on the first rank to fail; `Apart` where the ranks lost each other.
        """
        if (degree, replica) not in self._worlds:
            self._worlds[degree, replica] = _Ranks(degree, replica, self.device)
        return self._worlds[degree, replica].run(work)


class _Ranks:
    """The threads of one world, each of which waits for work."""

    def __init__(self, degree: int, replica: int, device: torch.device):
        self.degree, self.replica, self.device = degree, replica, device
        self._work: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(degree)]
        self._ended: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        # Daemons: an interrupted process ends, whatever they wait for.
        self._threads = [
            threading.Thread(target=self._be, args=(rank,), daemon=True) for rank in range(degree)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[Thread], T]) -> T:
        meeting = _ThreadGroup.meeting = Meeting(self.degree, self.replica)
        for queue in self._work:
            queue.put((work, meeting))
        try:
            ended = [self._ended.get() for _ in range(self.degree)]
        except BaseException:  # an interrupt: the ranks end before it goes on
            meeting.stop()
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

    def _be(self, rank: int) -> None:
        dist.init_process_group(
            "titanplans_threads",
            rank=self.replica * self.degree + rank,
            world_size=2 * self.degree,
            store=dist.HashStore(),
        )
        mesh: DeviceMesh | None = None

        def be(work: Callable[[Thread], Any], meeting: Meeting) -> Any:
            nonlocal mesh
            if mesh is None:
                mesh = DeviceMesh(self.device.type, meeting.in_world, mesh_dim_names=("tp",))
                know_by_thread(mesh)
            return work(Thread(mesh, rank, meeting))

        while (job := self._work[rank].get()) is not None:
            work, meeting = job
            result, failure = None, None
            try:
                meeting.wait(rank)
                with torch.autograd.set_multithreading_enabled(False):
                    result = meeting.together(rank, partial(be, work, meeting))
            except _Left:
                pass
            except BaseException as error:  # noqa: BLE001 -- raised again in the caller's thread
                failure = error
            meeting.hand_over(rank)
            self._ended.put((rank, result, failure))
        dist.destroy_process_group()


def run(degree: int, device: torch.device, work: Callable[[Thread], T]) -> T:
    """Run `work` on each of `degree` threads, and return what it returns on the first: a `Pool` for one time.

    Raises:
        PlanError: this process is a rank already.
        Exception: as `Pool.run`.
    """
    with Pool(device) as pool:
        return pool.run(degree, work)
