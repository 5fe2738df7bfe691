"""SIGINT and SIGTERM as an exception, with a limit on the time that the clean-up may take."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SECONDS_TO_STOP = 5.0


class Stopped(KeyboardInterrupt):
    """A signal to stop has arrived. A `KeyboardInterrupt`, so that libraries let it pass."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(signal.Signals(signum).name)

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as a shell reports it."""
        return 128 + self.signum


@contextlib.contextmanager
def stop_on_signals(*more: int) -> Iterator[None]:
    """Raise `Stopped` in the main thread at the first SIGINT, SIGTERM or signal of `more`; later ones are ignored.

    A process that has not ended 5 seconds after the signal is ended. The clock runs in a thread of its own, to which the C
    handler writes the signal through a pipe: Python's handlers run in the main thread, between two bytecodes, and that
    thread may be waiting in a collective for a rank that is gone.
    """
    signums = (signal.SIGINT, signal.SIGTERM, *more)

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in signums:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signum)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    done = threading.Event()
    previous = {signum: signal.signal(signum, stop) for signum in signums}
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_after_signal, args=(reader, signums, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(previous_fd)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        os.close(writer)  # ends the thread's read


def _end_after_signal(reader: int, ending: tuple[int, ...], done: threading.Event) -> None:
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while signums := pipe.read(1):  # b"" once the other end is closed
            if signums[0] in ending:
                if not done.wait(_SECONDS_TO_STOP):
                    os._exit(128 + signums[0])
                return
