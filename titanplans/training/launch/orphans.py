"""A rank whose parent is gone ends: nobody else would stop it, restart it, or see how it ended.

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
