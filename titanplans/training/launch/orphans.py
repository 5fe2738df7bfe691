"""End ranks and data-loader workers whose parent process is gone, since nothing else would stop or restart them.

Imports no torch, so that a rank that torchrun has started can call `end_with_parent` first.
"""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0


def end_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, or at once if the parent has ended.

    On Linux the kernel does this (prctl(2), PR_SET_PDEATHSIG), whatever the process is doing; elsewhere a thread polls.

    Args:
        parent: the process id of the parent.
    """
    # SIGKILL is safe: checkpoints on the disk are consistent at any moment (titanplans/training/checkpoint/folder.py).
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # The parent may have ended before prctl was called.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_rank(rank: int, worker: int) -> None:
    """Make a data-loader worker end with its rank and not before. Used as `worker_init_fn` of torch's DataLoader.

    On Linux the worker ignores SIGTERM, unless its rank sends it. A scheduler signals every process, but the rank, which may
    save before it ends, still needs the worker. When the rank exits, Python sends SIGTERM to the worker and waits for it.

    Args:
        rank: the process id of the rank. `os.getppid()` in the worker would be wrong if the rank has ended already.
        worker: the index of the worker, which DataLoader passes; unused.
    """
    end_with_parent(rank)
    if sys.platform == "linux":  # only on Linux can a process find out who has sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_sigterm_of_rank, daemon=True).start()


def _exit_on_sigterm_of_rank() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
