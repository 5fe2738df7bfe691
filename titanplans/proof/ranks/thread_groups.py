"""Process groups of ranks that are threads: torch's, in a world larger than the mesh.

The world is a job with two data-parallel replicas, and the threads are one of them. The other replica's ranks have no
threads, so a collective that waits for them is refused: its plan takes the default group for the mesh's.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist

from titanplans.proof.ranks.lockstep import Lockstep
from titanplans.torch_private.swapped import swapped
from titanplans.torch_private.threads import threaded_groups as threaded

BACKEND = "titanplans_threads"


class ThreadGroup(threaded.ProcessLocalGroup):
    """torch's process group of threads. Its ranks meet at `lockstep`, which detects ranks that disagree."""

    lockstep: Lockstep

    def __init__(self, rank: int, size: int, in_world: list[int]):
        super().__init__(rank, size)
        self.in_world = in_world
        """Its ranks' numbers in the world; none for the default group."""

    def _meet(self, collective: Any, tensors: Any, value: Any) -> Any:
        name = type(collective).__name__
        part = self.in_world != self.lockstep.in_world and bool(self.in_world)
        if part and not set(self.in_world) <= set(self.lockstep.in_world):
            self._refuse(name)
        if not self.in_world and not _goes_over_all(collective):
            self._refuse(name)
        what = (name, *vars(collective).items(), *((t.shape, t.dtype) for t in tensors))
        ranks = tuple(map(self.lockstep.in_world.index, self.in_world)) if part else None
        rank = self._rank % self.lockstep.ranks if ranks is None else ranks[self._rank]
        self.lockstep(rank, what, value, collective.work, ranks)
        return threaded.ret_work(value)

    def _refuse(self, name: str) -> NoReturn:
        called = f"{_caller()} called {name} on "
        group = (
            f"the group of ranks {', '.join(map(str, self.in_world))}"
            if self.in_world
            else "the default group"
        )
        raise RuntimeError(
            f"{called}{group}, in which other data-parallel ranks are, too: use the mesh's group, mesh.get_group()"
        )

    def _get_backend(self, device):  # type: ignore[override]
        """Return itself: it communicates without a backend."""
        return self

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

    def _allgather_base(self, output, input, opts=None):  # type: ignore[override]
        return self.allgather([list(output.chunk(self.size()))], [input])

    all_gather_single = _allgather_base  # type: ignore[assignment]  torch 2.13's name

    def _reduce_scatter_base(self, output, input, opts):  # type: ignore[override]
        return self.reduce_scatter([output], [list(input.chunk(self.size()))], opts)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]  torch 2.13's name

    def alltoall(self, outputs, inputs, opts=None):  # type: ignore[override]
        return self._meet(threaded.AllToAll(), (), (outputs, inputs))

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts=None):  # type: ignore[override]
        return self._meet(threaded.AllToAllBase(), (), (output, input, output_sizes, input_sizes))

    alltoall_base = all_to_all_single  # type: ignore[assignment]  torch 2.11's name


def _running() -> Iterator[str]:
    """Yield the names of the Python modules whose code runs on this thread, the innermost first, without the proof's."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"] != threading.__name__:
        if not (name := frame.f_globals["__name__"]).startswith("titanplans.proof."):
            yield name
        frame = frame.f_back


def _caller() -> str:
    """Return who called torch: a Python module, or the backward if only torch is running."""
    return next((name for name in _running() if name.partition(".")[0] != "torch"), "the backward")


def _goes_over_all(collective: Any) -> bool:
    """Whether a collective on the default group may leave out the ranks without threads.

    A barrier may, and torch's test of DTensors for equality, which every right replica answers alike.
    """
    if isinstance(collective, _Barrier):
        return True
    asks = next(name for name in _running() if name not in _COLLECTIVES)
    return asks.startswith("torch.distributed.tensor.")


class _Barrier:
    def work(self, data: list) -> None:
        """Do nothing: the ranks have met."""


_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.overrides")


@contextmanager
def asking_noted() -> Iterator[None]:
    """Note who asks `dist.get_rank()`: such code may act differently in another replica."""
    own = dist.get_rank

    def get_rank(group: dist.ProcessGroup | None = None) -> int:
        rank, who = own(group), next(_running())
        if group is None and who.partition(".")[0] not in ("torch", "titanplans"):
            ThreadGroup.lockstep.asked[who] = None
        return rank

    with swapped(dist, "get_rank", get_rank):
        yield


dist.Backend.register_backend(
    BACKEND,
    lambda options, _: ThreadGroup(options.group_rank, options.group_size, options.global_ranks_in_group),
    extended_api=True,
    devices=["cpu", "cuda"],
)
