"""SIGINT and SIGTERM as an exception, with a limit on the time that the clean-up may take; or SIGTERM as a request."""

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SECONDS_TO_STOP = 5.0
_SECONDS_OF_ONE = 2.0
"""What arrives so soon after a signal is the same one: a scheduler signals every process, and launchers pass it on."""

_OVER = b"\0"
"""Tells the thread that the body has ended."""


class Stopped(KeyboardInterrupt):
    """A signal to stop has arrived. A `KeyboardInterrupt`, so that libraries let it pass."""

    said = False
    """Whether a line has told so."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(signal.Signals(signum).name)

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as a shell reports it."""
        return 128 + self.signum


@contextlib.contextmanager
def stop_on_signals(*more: int, first_sigterm: Callable[[], None] | None = None) -> Iterator[None]:
    """Raise `Stopped` in the main thread at the first SIGINT, SIGTERM or signal of `more`.

    What the body raises after that, or whatever else a library has made of it, is that `Stopped`, too. A process that has
    not ended 5 seconds after the signal is ended, and at once by a second signal. A thread decides, to which the C handler
    writes each signal through a pipe: Python's handlers run in the main thread, between two bytecodes, and that thread
    may be waiting in a collective for a rank that is gone.

    Args:
        more: other signals that stop.
        first_sigterm: called, in the thread, by the first SIGTERM instead; the next signal stops.
    """
    watch = _Watch((signal.SIGINT, signal.SIGTERM, *more), first_sigterm)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = {signum: signal.signal(signum, watch.raise_if_stopped) for signum in watch.signums}
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch.run, args=(reader,), daemon=True)
    thread.start()
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, watch.signums
    )  # a launcher starts its ranks with these blocked
    try:
        try:
            yield
        finally:
            watch.raised = True
            signal.set_wakeup_fd(previous_fd)
            os.write(writer, _OVER)  # closing it is not enough: forks have it, too
            os.close(writer)
            thread.join()  # it has read what arrived before
            for signum, handler in previous.items():
                signal.signal(signum, handler)
    except BaseException as error:
        if watch.stopped is None or error is watch.stopped:
            raise
        raise watch.stopped from None
    if watch.stopped is not None:
        raise watch.stopped


class _Watch:
    """Decides in a thread what each signal means: a request, a stop, the end, or nothing."""

    def __init__(self, signums: tuple[int, ...], first_sigterm: Callable[[], None] | None):
        self.signums, self.first_sigterm = signums, first_sigterm
        self.stopped: Stopped | None = None
        self.raised = False

    def raise_if_stopped(self, signum: int, frame: FrameType | None) -> None:
        """Raise in the main thread, once, what the thread has decided."""
        if self.stopped is not None and not self.raised:
            self.raised = True
            raise self.stopped

    def run(self, reader: int) -> None:
        """Read signals until the body is over; end the process where that takes too long."""
        deadline, last, asked = None, -_SECONDS_OF_ONE, False
        with os.fdopen(reader, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while selector.select(deadline and max(0.0, deadline - time.monotonic())):
                byte = pipe.read(1)
                if byte in (b"", _OVER):
                    return
                signum, now = byte[0], time.monotonic()
                repeated = now - last < _SECONDS_OF_ONE
                if signum not in self.signums or (repeated and (self.stopped or signum == signal.SIGTERM)):
                    continue
                last = now
                if self.stopped is not None:
                    os._exit(128 + signum)
                if signum == signal.SIGTERM and self.first_sigterm is not None and not asked:
                    asked = True
                    self.first_sigterm()
                else:
                    self.stopped, deadline = Stopped(signum), now + _SECONDS_TO_STOP
                    # The system may have interrupted another thread, and the main one waits on.
                    signal.pthread_kill(threading.main_thread().ident or 0, signum)
            os._exit(self.stopped.exit_status if self.stopped is not None else 1)
