"""How long a loader's worker process lives: as long as its rank."""

import os
import signal
import sys
import threading

from titanplans.training.launch.orphans import end_with_parent


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
