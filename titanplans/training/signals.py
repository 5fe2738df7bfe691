"""SIGINT and SIGTERM as an exception, and a bound on how long the clean-up may take."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECONDS_TO_STOP = 5.0


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM has arrived. A `KeyboardInterrupt`, so that libraries let it pass."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(signal.Signals(signum).name)

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as a shell reports it."""
        return 128 + self.signum


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise `Stopped` in the main thread at the first SIGINT or SIGTERM; later ones are ignored.

    A process that has not ended 5 seconds after the signal is ended. Python runs its handlers between
    bytecodes of the main thread, which may be waiting in a collective for a rank that is gone: so the
    clock runs in a thread of its own, which hears of the signal from the C handler, through a pipe.
    """
    heard, tell = os.pipe()
    os.set_blocking(tell, False)
    done = threading.Event()
    previous = {signum: signal.signal(signum, _raise_stopped) for signum in _SIGNALS}
    previous_fd = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    threading.Thread(target=_end_after_signal, args=(heard, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(previous_fd)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        os.close(tell)  # ends the thread's read


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(signum)


def _end_after_signal(heard: int, done: threading.Event) -> None:
    with os.fdopen(heard, "rb", buffering=0) as pipe:
        while signums := pipe.read(1):  # b"" once the other end is closed
            if signums[0] in _SIGNALS:
                if not done.wait(_SECONDS_TO_STOP):
                    os._exit(128 + signums[0])
                return
