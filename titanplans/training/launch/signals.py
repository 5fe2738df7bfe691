"""SIGINT and SIGTERM as an exception, with a limit on the time that the clean-up may take; or SIGTERM as a request."""

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Literal

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
    not ended 5 seconds after the signal is ended, and at once by a second signal. The clock runs in a thread of its own,
    to which the C handler writes the signal through a pipe: Python's handlers run in the main thread, between two
    bytecodes, and that thread may be waiting in a collective for a rank that is gone.

    Args:
        more: other signals that stop.
        first_sigterm: called in the main thread by the first SIGTERM instead; the next signal stops.
    """
    signums = (signal.SIGINT, signal.SIGTERM, *more)
    in_handler = _Arrivals(signums, defer=first_sigterm is not None)
    stopped: Stopped | None = None

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopped
        meaning = in_handler.meaning(signum)
        if meaning == "request" and first_sigterm is not None:
            first_sigterm()
        elif meaning == "stop":
            stopped = Stopped(signum)
            raise stopped

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = {signum: signal.signal(signum, stop) for signum in signums}
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    in_thread = _Arrivals(signums, defer=first_sigterm is not None)
    over = threading.Event()
    threading.Thread(target=_watch, args=(reader, in_thread, in_handler, over), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signums)  # a launcher starts its ranks with these blocked
    try:
        yield
        if stopped is not None:
            raise stopped
    except BaseException as error:
        if stopped is None or error is stopped:
            raise
        raise stopped from None
    finally:
        over.set()
        signal.set_wakeup_fd(previous_fd)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        os.write(writer, _OVER)  # closing it is not enough: forks have it, too
        os.close(writer)


class _Arrivals:
    """What each signal means, by those before it."""

    def __init__(self, signums: tuple[int, ...], *, defer: bool):
        self.signums, self.defer = signums, defer
        self.last = 0.0
        """When the first arrived that asked for something, or the one that stopped; 0: none has."""
        self.stopping = False
        self.meant = 0
        """How many have asked or stopped."""

    def meaning(self, signum: int) -> Literal["request", "stop", "end", "nothing"]:
        """Return whether a signal that has arrived asks, stops by way of an exception, or ends the process at once."""
        now = time.monotonic()
        if signum not in self.signums:
            return "nothing"
        repeated = self.last and now - self.last < _SECONDS_OF_ONE
        if self.stopping:
            return "nothing" if repeated else "end"
        if signum == signal.SIGTERM and self.defer and repeated:
            return "nothing"
        asks = signum == signal.SIGTERM and self.defer and not self.last
        self.last, self.stopping, self.meant = now, not asks, self.meant + 1
        return "request" if asks else "stop"


def _watch(reader: int, arrivals: _Arrivals, in_handler: _Arrivals, over: threading.Event) -> None:
    with os.fdopen(reader, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        deadline, status = None, 0
        while selector.select(deadline and max(0.0, deadline - time.monotonic())):
            byte = pipe.read(1)
            if byte in (b"", _OVER):
                return
            meaning = arrivals.meaning(byte[0])
            if meaning == "end":
                os._exit(128 + byte[0])
            if meaning == "stop":
                deadline, status = time.monotonic() + _SECONDS_TO_STOP, 128 + byte[0]
            # The system may have interrupted another thread, and the main one waits on.
            if meaning != "nothing" and not over.wait(0.2) and in_handler.meant < arrivals.meant:
                signal.pthread_kill(threading.main_thread().ident or 0, byte[0])
        os._exit(status)
