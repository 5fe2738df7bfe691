"""Ranks that are threads of this process: a third world for a proof, beside the simulated and the process group.

A mutation corpus proves a thousand split models. Simulated ranks take 0.4 s of CPU time for one of two
blocks, 2 s with FLA's recurrences, because every operation goes through Python; threads take a tenth of
a second, on real local tensors and real collectives. The proof is the same code; that both worlds give
the same verdict is tested on a sample.

One thread runs at a time and hands over at collectives only, so what is global in a process (the
operators of torch's loss parallelism) is never seen half done.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
    ret_work,
)

T = TypeVar("T")
Signature = tuple[Any, ...]

PATIENCE = 60
"""Seconds after which a rank that waits for the others gives up."""


class Apart(Exception):
    """The ranks did not meet: one of them failed, or they called different collectives."""


class Meeting:
    """Where the ranks wait for each other, and hand over."""

    def __init__(self, ranks: int):
        self.brought: list[tuple[Signature, Any, Callable]] = [((), None, lambda values: None)] * ranks
        self.result: Any = None
        self.barrier = threading.Barrier(ranks, action=self._act)
        self.baton = threading.Lock()

    def __call__(self, rank: int, signature: Signature, value: Any, act: Callable[[list], Any]) -> Any:
        """Bring `value`, wait for the other ranks, and return what `act` makes of all values, in rank order.

        Raises:
            threading.BrokenBarrierError: another rank brought another `signature`, or nothing.
        """
        self.brought[rank] = signature, value, act
        self.baton.release()
        try:
            self.barrier.wait(PATIENCE)
        finally:
            self.baton.acquire()
        return self.result

    def _act(self) -> None:
        signatures = [signature for signature, _, _ in self.brought]
        if any(signature != signatures[0] for signature in signatures):
            raise Apart(f"collectives of different kinds or shapes: {signatures}")
        with torch.no_grad():
            self.result = self.brought[0][2]([value for _, value, _ in self.brought])


class ThreadGroup(ProcessLocalGroup):
    """torch's process group of threads, its collectives by `Meeting`, which sees ranks that disagree."""

    meeting: Meeting

    def _meet(self, kind: str, tensors: list[torch.Tensor], value: Any, act: Callable[[list], None]) -> Any:
        self.meeting(self._rank, (kind, [(t.shape, t.dtype) for t in tensors]), value, act)
        return ret_work(value)

    def allreduce(self, tensors, opts):
        def act(ranks):
            for parts in zip(*ranks, strict=True):
                total = torch.stack(parts)
                total = total.amax(0) if opts.reduceOp.op == dist.ReduceOp.MAX else total.sum(0)
                for part in parts:
                    part.detach().copy_(total)

        assert opts.reduceOp.op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX), opts.reduceOp.op
        return self._meet(f"all-reduce {opts.reduceOp.op}", tensors, tensors, act)

    def broadcast(self, tensors, opts):
        def act(ranks):
            for rank in ranks:
                for tensor, source in zip(rank, ranks[opts.rootRank], strict=True):
                    tensor.detach().copy_(source.clone())

        return self._meet(f"broadcast {opts.rootRank}", tensors, tensors, act)

    def scatter(self, outputs, inputs, opts):
        def act(ranks):
            for (output,), source in zip((o for o, _ in ranks), ranks[opts.rootRank][1][0], strict=True):
                output.detach().copy_(source)

        return self._meet(f"scatter {opts.rootRank}", outputs, (outputs, inputs), act)

    def allgather(self, outputs, inputs, opts):
        def act(ranks):
            for (gathered,), _ in ranks:
                for output, (_, (source,)) in zip(gathered, ranks, strict=True):
                    output.detach().copy_(source)

        return self._meet("all-gather", inputs, (outputs, inputs), act)

    def reduce_scatter(self, outputs, inputs, opts):
        def act(ranks):
            for (output,), shares in zip(
                (o for o, _ in ranks), zip(*(i[0] for _, i in ranks), strict=True), strict=True
            ):
                output.detach().copy_(torch.stack(shares).sum(0))

        assert opts.reduceOp.op == dist.ReduceOp.SUM, opts.reduceOp.op
        return self._meet("reduce-scatter", outputs, (outputs, inputs), act)


class ThreadWorld:
    """The world (plans/proof/world.py) as one of the threads sees it."""

    exact = True

    def __init__(self, mesh: DeviceMesh, rank: int, meeting: Meeting):
        self.mesh, self.rank, self.meeting = mesh, rank, meeting

    def settle(self, model: torch.nn.Module) -> None:
        """Nothing to do: each thread has a model of its own."""

    def every(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return self.meeting(self.rank, ("every",), local.detach(), lambda values: [v.clone() for v in values])

    def agreed(self, value: T) -> T:
        return self.meeting(self.rank, ("agreed",), value, lambda values: values[0])


dist.Backend.register_backend(
    "mutants", lambda store, rank, size, timeout: ThreadGroup(rank, size), devices=["cpu"]
)


def run(ranks: int, work: Callable[[ThreadWorld], T]) -> T:
    """Return what `work` returns on the first of `ranks` threads.

    Raises:
        Apart: the ranks lost each other.
        Exception: what `work` raised on any of them.
    """
    meeting = ThreadGroup.meeting = Meeting(ranks)
    store = dist.HashStore()
    results: list[Any] = [None] * ranks

    def be(rank: int) -> None:
        # A rank gets its group before it takes the baton: the store's barrier knows nothing of it.
        dist.init_process_group("mutants", rank=rank, world_size=ranks, store=store)
        with meeting.baton, torch.autograd.set_multithreading_enabled(False):
            try:
                mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
                results[rank] = work(ThreadWorld(mesh, rank, meeting))
            except BaseException as error:  # noqa: BLE001 -- `run` raises it again, in its own thread
                meeting.barrier.abort()
                results[rank] = error
            finally:
                dist.destroy_process_group()

    with _threaded():
        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, Apart | threading.BrokenBarrierError):
            raise error
    if errors:
        raise next((error for error in errors if isinstance(error, Apart)), Apart("a rank did not come"))
    return results[0]


@contextmanager
def _threaded() -> Iterator[None]:
    """Give every thread its own process groups, and all of them one loss parallelism."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    excepthook = sys.excepthook  # torch puts its own before it with each process group
    try:
        yield
    finally:
        sys.excepthook = excepthook
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
