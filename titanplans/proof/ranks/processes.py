"""Independent pieces of a proof side by side, in forked processes: threads take turns, so a process keeps one core busy."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from titanplans.errors import UserError

T = TypeVar("T")

Tell = Callable[[Any], None]
"""Takes news before the end, which can be pickled."""


def side_by_side(
    work: Callable[[Iterator[int], Tell], T],
    number: int,
    processes: int,
    heard: Tell = lambda news: None,
) -> list[T]:
    """Return the result of `work`, which can be pickled, in each process.

    `work` gets an iterator over its share of `range(number)`: each process takes the next number when it is done with one.
    `heard` is called here with its news. Several processes need Linux, and a process in which torch has neither run a
    backward nor used a second thread: a later fork has no autograd, and waits for threads that it does not have.

    Raises:
        UserError: from one of them.
        RuntimeError: a process ended without a result.
    """
    if min(number, processes) == 1:
        return [work(iter(range(number)), heard)]
    context = multiprocessing.get_context("fork")
    taken = context.Value("i", 0)
    running: dict[Connection, Any] = {}
    try:
        for _ in range(min(number, processes)):
            receiver, sender = context.Pipe(duplex=False)
            turns = _turns(taken, number)
            one = partial(work, turns, lambda news, sender=sender: sender.send((False, news)))
            process = context.Process(target=_do, args=(one, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = process
        results: dict[Connection, T] = {}
        while len(results) < len(running):
            for receiver in wait([one for one in running if one not in results]):
                ended, value = _received(running[receiver], receiver)  # type: ignore[arg-type]
                if ended:
                    results[receiver] = value  # type: ignore[index]
                else:
                    heard(value)
        return [results[receiver] for receiver in running]
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _turns(taken: Any, number: int) -> Iterator[int]:
    while True:
        with taken.get_lock():
            at, taken.value = taken.value, taken.value + 1
        if at >= number:
            return
        yield at


def _received(process: Any, receiver: Connection) -> tuple[bool, Any]:
    """Return whether a process has sent its result, and the result or the news."""
    try:
        ended, value = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a process of the proof ended with exit code {process.exitcode}") from None
    if ended and isinstance(value, UserError):
        raise value
    return ended, value


def _do(one: Callable[[], Any], sender: Connection) -> None:
    # The parent handles signals, and ends this process.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        result = one()
    except UserError as error:
        result = error
    sender.send((True, result))
    sender.close()
    os._exit(0)  # without the exit handlers that this process inherited
