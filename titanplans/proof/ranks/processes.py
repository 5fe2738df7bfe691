"""Run parts of a proof in forked processes. Ranks that are threads run one at a time, so one process uses only one
core."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from titanplans.errors import UserError

T = TypeVar("T")

OnUpdate = Callable[[Any], None]
"""A function that is called with each update, a picklable value, while the work runs."""


def run_in_processes(
    work: Callable[[Iterator[int], OnUpdate], T],
    count: int,
    processes: int,
    on_update: OnUpdate = lambda update: None,
) -> list[T]:
    """Run `work` in each of at most `processes` processes, and return their results, which must be picklable.

    With one process, `work` runs in the current process. Several processes need Linux, and have to be forked before torch
    has run a backward or used a second thread in the current process: after a later fork autograd does not work, and the
    child waits for threads that were not copied.

    Args:
        work: is called with an iterator of indices and a function that sends an update.
        count: the processes share the indices `range(count)`; each takes the next one when it has finished one.
        processes: number of processes.
        on_update: is called in this process with each update.

    Raises:
        UserError: raised by `work` in one of the processes.
        RuntimeError: a process ended without a result.
    """
    if min(count, processes) == 1:
        return [work(iter(range(count)), on_update)]
    context = multiprocessing.get_context("fork")
    next_index = context.Value("i", 0)
    running: dict[Connection, Any] = {}
    try:
        for _ in range(min(count, processes)):
            receiver, sender = context.Pipe(duplex=False)
            indices = _take_indices(next_index, count)
            job = partial(work, indices, lambda update, sender=sender: sender.send((False, update)))
            process = context.Process(target=_work_and_exit, args=(job, sender), daemon=True)
            process.start()
            sender.close()  # now only the child has it open, so the receiver notices when the child ends
            running[receiver] = process
        results: dict[Connection, T] = {}
        while len(results) < len(running):
            for receiver in wait([receiver for receiver in running if receiver not in results]):
                is_result, value = _receive(running[receiver], receiver)  # type: ignore[arg-type]
                if is_result:
                    results[receiver] = value  # type: ignore[index]
                else:
                    on_update(value)
        return [results[receiver] for receiver in running]
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _take_indices(next_index: Any, count: int) -> Iterator[int]:
    while True:
        with next_index.get_lock():
            index, next_index.value = next_index.value, next_index.value + 1
        if index >= count:
            return
        yield index


def _receive(process: Any, receiver: Connection) -> tuple[bool, Any]:
    """Return whether the received value is the result of `process`, and the value: its result or an update."""
    try:
        is_result, value = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a process of the proof ended with exit code {process.exitcode}") from None
    if is_result and isinstance(value, UserError):
        raise value
    return is_result, value


def _work_and_exit(job: Callable[[], Any], sender: Connection) -> None:
    # The parent handles signals, and ends this process.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        result = job()
    except UserError as error:
        result = error
    sender.send((True, result))
    sender.close()
    os._exit(0)  # skip the exit handlers that this process inherited
