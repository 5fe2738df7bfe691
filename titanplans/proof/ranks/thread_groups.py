"""The process group of ranks that are threads, and a record of the code that calls `dist.get_rank()`. Start at
`ThreadGroup`."""

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
    """Process group whose ranks are threads: torch's class, with collectives that run through `lockstep`.

    The world is a job with two data-parallel replicas, and the threads are the ranks of one of them. The other replica's
    ranks have no threads. A collective that includes the other replica is refused, because the plan then used the default
    group instead of the mesh's group.
    """

    lockstep: Lockstep

    def __init__(self, rank: int, size: int, global_ranks: list[int]):
        super().__init__(rank, size)
        self.global_ranks = global_ranks
        """The global ranks of this group; empty for the default group."""

    def _meet(self, collective: Any, tensors: Any, value: Any) -> Any:
        name = type(collective).__name__
        is_subgroup = self.global_ranks != self.lockstep.global_ranks and bool(self.global_ranks)
        if is_subgroup and not set(self.global_ranks) <= set(self.lockstep.global_ranks):
            self._refuse(name)
        if not self.global_ranks and not _may_skip_other_replica(collective):
            self._refuse(name)
        what = (name, *vars(collective).items(), *((t.shape, t.dtype) for t in tensors))
        ranks = tuple(map(self.lockstep.global_ranks.index, self.global_ranks)) if is_subgroup else None
        rank = self._rank % self.lockstep.ranks if ranks is None else ranks[self._rank]
        self.lockstep(rank, what, value, collective.work, ranks)
        return threaded.ret_work(value)

    def _refuse(self, name: str) -> NoReturn:
        group = (
            f"the group of ranks {', '.join(map(str, self.global_ranks))}"
            if self.global_ranks
            else "the default group"
        )
        raise RuntimeError(
            f"{_caller()} called {name} on {group}, in which other data-parallel ranks are, too: use the mesh's group, "
            "mesh.get_group()"
        )

    def _get_backend(self, device):  # type: ignore[override]
        return self  # this group communicates without a backend

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


def _modules_on_stack() -> Iterator[str]:
    """Yield the Python module of each frame on this thread's stack, innermost first, without the proof's own."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"] != threading.__name__:
        if not (name := frame.f_globals["__name__"]).startswith("titanplans.proof."):
            yield name
        frame = frame.f_back


def _caller() -> str:
    """Return the Python module that called torch, or "the backward" if torch alone is on the stack."""
    return next((name for name in _modules_on_stack() if name.partition(".")[0] != "torch"), "the backward")


def _may_skip_other_replica(collective: Any) -> bool:
    """Whether a collective on the default group is right without the other replica's ranks.

    This holds for a barrier, and for torch's comparison of DTensors, whose result is the same in every correct replica.
    """
    if isinstance(collective, _Barrier):
        return True
    caller = next(name for name in _modules_on_stack() if name not in _COLLECTIVES)
    return caller.startswith("torch.distributed.tensor.")


class _Barrier:
    def work(self, data: list) -> None:
        pass  # nothing is left to do once all ranks have arrived


_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.overrides")


@contextmanager
def note_rank_queries() -> Iterator[None]:
    """Record in `Lockstep.rank_queries` which Python modules call `dist.get_rank()`, other than torch's and ours."""
    original = dist.get_rank

    def get_rank(group: dist.ProcessGroup | None = None) -> int:
        rank, module = original(group), next(_modules_on_stack())
        if group is None and module.partition(".")[0] not in ("torch", "titanplans"):
            ThreadGroup.lockstep.rank_queries[module] = None
        return rank

    # Code that asks for its global rank may act differently in another data-parallel replica.
    with swapped(dist, "get_rank", get_rank):
        yield


dist.Backend.register_backend(
    BACKEND,
    lambda options, _: ThreadGroup(options.group_rank, options.group_size, options.global_ranks_in_group),
    extended_api=True,
    devices=["cpu", "cuda"],
)
