"""A rank whose parent is gone ends, and so does a loader's worker: nobody else would stop, restart or miss it.

It is killed, not asked: its files on the disk are consistent at any moment (titanplans/training/checkpoint/folder.py). Needs
no torch, so that a rank which torchrun has started can ask for it before it imports anything.
"""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_SECONDS = 1.0


def end_with_parent(parent: int) -> None:
    """Let this process end when `parent`, the process that has started it, does, or at once where that has ended.

    On Linux the system kills it (prctl(2), PR_SET_PDEATHSIG), whatever it is doing; elsewhere a thread looks each second.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # It may have ended before the system was asked.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def live_as_long_as_the_rank(rank: int, worker: int) -> None:
    """Let a worker end with its rank, and not before: a scheduler's SIGTERM reaches it, too, and the rank may still save.

    The rank's own ends it: Python sends one as it exits, and waits for the worker.

    Args:
        rank: the process id of the rank: asked now, it may have ended already, and another be the parent.
        worker: which of the rank's it is.
    """
    end_with_parent(rank)
    if sys.platform == "linux":  # elsewhere it can't be asked who has sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_the_rank_asks, daemon=True).start()


def _end_when_the_rank_asks() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
