"""Independent pieces of a proof side by side, each in a process that is forked for it.

Ranks that are threads run one at a time, so one process keeps one core busy.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from titanplans.errors import UserError

T = TypeVar("T")


def side_by_side(work: Sequence[Callable[[], T]]) -> list[T]:
    """Return what each of `work` returns, which can be pickled; one runs here.

    The others need Linux, and a process in which torch has neither run a backward nor used a second thread: what is
    forked later has no autograd, and waits for threads that it does not have.

    Raises:
        UserError: what one of them raised.
        RuntimeError: a process ended without a result.
    """
    if len(work) == 1:
        return [work[0]()]
    context = multiprocessing.get_context("fork")
    running = []
    try:
        for one in work:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_do, args=(one, sender), daemon=True)
            process.start()
            sender.close()
            running.append((process, receiver))
        return [_result(process, receiver) for process, receiver in running]
    finally:
        for process, _ in running:
            process.terminate()
            process.join()


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
