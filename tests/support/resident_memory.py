"""The memory of this process, as the system counts it."""

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return how many MB the process has grown in `action` at most, and what it returned.

    What is freed of a megabyte or more goes back to the system from now on: glibc would keep some of it.
    """
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = _resident("VmRSS")
    result = action()
    return _resident("VmHWM") - before, result


def peak_without_files(action: Callable[[], Any]) -> float:
    """The same without the pages of files that are mapped, which the system takes back; looked at each millisecond."""
    ctypes.CDLL(None).mallopt(-3, 2**20)
    gc.collect()
    before, seen, done = _resident("RssAnon"), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(_resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        done.set()
        watcher.join()
    return max(seen) - before


def _resident(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024
