"""Independent pieces of a proof side by side, each in a process that is forked for it.

Ranks that are threads run one at a time, so one process keeps one core busy.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from titanplans.errors import UserError

T = TypeVar("T")


def side_by_side(work: Callable[[Iterator[int]], T], number: int, processes: int) -> list[T]:
    """Return what `work` returns in each of so many processes, which can be pickled.

    It is given an iterator over its share of `range(number)`: each process takes the next number when it is done with one.
    Several processes need Linux, and a process in which torch has neither run a backward nor used a second thread: what is
    forked later has no autograd, and waits for threads that it does not have.

    Raises:
        UserError: what one of them raised.
        RuntimeError: a process ended without a result.
    """
    if min(number, processes) == 1:
        return [work(iter(range(number)))]
    context = multiprocessing.get_context("fork")
    taken = context.Value("i", 0)
    running = []
    try:
        for _ in range(min(number, processes)):
            receiver, sender = context.Pipe(duplex=False)
            turns = _turns(taken, number)
            process = context.Process(target=_do, args=(partial(work, turns), sender), daemon=True)
            process.start()
            sender.close()
            running.append((process, receiver))
        return [_result(process, receiver) for process, receiver in running]
    finally:
        for process, _ in running:
            process.terminate()
            process.join()


def _turns(taken: Any, number: int) -> Iterator[int]:
    while True:
        with taken.get_lock():
            at, taken.value = taken.value, taken.value + 1
        if at >= number:
            return
        yield at


def _result(process: Any, receiver: Connection) -> Any:
    try:
        result = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a process of the proof ended with exit code {process.exitcode}") from None
    if isinstance(result, UserError):
        raise result
    return result


def _do(one: Callable[[], Any], sender: Connection) -> None:
    # The parent's signals are its own: it ends this process.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        result = one()
    except UserError as error:
        result = error
    sender.send(result)
    sender.close()
    os._exit(0)  # without the exit handlers that this process inherited
