"""`stop_on_signals`: convert SIGINT and SIGTERM to an exception. The first SIGTERM may call a function instead."""

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SECONDS_TO_STOP = 5.0
_REPEAT_SECONDS = 2.0
"""A signal within this time after another one is a duplicate: a scheduler signals every process, and launchers forward the
signal."""

_BODY_ENDED = b"\0"
"""Tells the thread that the body of `stop_on_signals` has ended."""


class Stopped(KeyboardInterrupt):
    """A signal to stop has arrived."""

    # Libraries catch an Exception, but not a KeyboardInterrupt.

    is_reported = False
    """Whether a line about the signal has been printed."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(signal.Signals(signum).name)

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as in shells."""
        return 128 + self.signum


@contextlib.contextmanager
def stop_on_signals(*more: int, first_sigterm: Callable[[], None] | None = None) -> Iterator[None]:
    """Raise `Stopped` in the main thread at the first SIGINT, SIGTERM or signal of `more`.

    Any other exception that leaves the body after the signal is replaced with this `Stopped`. The process exits at once at
    a second signal, and at the latest 5 seconds after the first one.

    Args:
        more: other signals that stop the body.
        first_sigterm: called at the first SIGTERM, in another thread, instead of stopping; the next signal stops.
    """
    # Python's handlers run in the main thread, between two bytecodes, and the main thread may be waiting in a collective
    # for a rank that is gone. So another thread decides; Python's C handler sends each signal to it through a pipe.
    watch = _SignalWatch((signal.SIGINT, signal.SIGTERM, *more), first_sigterm)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = {signum: signal.signal(signum, watch.raise_if_stopped) for signum in watch.signums}
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch.run, args=(reader,), daemon=True)
    thread.start()
    # The launcher starts ranks with these signals blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watch.signums)
    try:
        try:
            yield
        finally:
            watch.is_raised = True
            signal.set_wakeup_fd(previous_fd)
            os.write(writer, _BODY_ENDED)  # closing the pipe is not enough: forks have it open, too
            os.close(writer)
            thread.join()  # now it has handled every signal that arrived in the body
            for signum, handler in previous.items():
                signal.signal(signum, handler)
    except BaseException as error:
        if watch.stopped is None or error is watch.stopped:
            raise
        raise watch.stopped from None
    if watch.stopped is not None:
        raise watch.stopped


class _SignalWatch:
    """Decides in a thread what a signal means: a request, a stop, an immediate exit, or nothing (a duplicate)."""

    def __init__(self, signums: tuple[int, ...], first_sigterm: Callable[[], None] | None):
        self.signums, self.first_sigterm = signums, first_sigterm
        self.stopped: Stopped | None = None
        self.is_raised = False

    def raise_if_stopped(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal in Python: raise `stopped` once, in the main thread."""
        if self.stopped is not None and not self.is_raised:
            self.is_raised = True
            raise self.stopped

    def run(self, reader: int) -> None:
        """Handle signals until the body ends; exit the process if the body takes too long to end."""
        deadline, last, is_requested = None, -_REPEAT_SECONDS, False
        with os.fdopen(reader, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while selector.select(deadline and max(0.0, deadline - time.monotonic())):
                byte = pipe.read(1)
                if byte in (b"", _BODY_ENDED):
                    return
                signum, now = byte[0], time.monotonic()
                is_repeated = now - last < _REPEAT_SECONDS
                if signum not in self.signums or (is_repeated and (self.stopped or signum == signal.SIGTERM)):
                    continue
                last = now
                if self.stopped is not None:
                    os._exit(128 + signum)
                if signum == signal.SIGTERM and self.first_sigterm is not None and not is_requested:
                    is_requested = True
                    self.first_sigterm()
                else:
                    self.stopped, deadline = Stopped(signum), now + _SECONDS_TO_STOP
                    # The kernel may have delivered the signal to another thread, while the main one, which runs the
                    # handler, is still waiting.
                    signal.pthread_kill(threading.main_thread().ident or 0, signum)
            os._exit(self.stopped.exit_status if self.stopped is not None else 1)
