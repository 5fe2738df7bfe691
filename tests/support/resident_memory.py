"""Measure the resident memory of this process."""

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the largest growth of resident memory during `action`, in MB, and the result of `action`.

    After this call, glibc returns freed memory of a megabyte or more to the system at once.
    """
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = _resident("VmRSS")
    result = action()
    return _resident("VmHWM") - before, result


def peak_without_files(action: Callable[[], Any]) -> float:
    """Return the largest growth of resident memory during `action`, in MB, without pages of mapped files.

    Pages of mapped files are not counted, because the system can reclaim them. The memory is sampled every millisecond.
    """
    ctypes.CDLL(None).mallopt(-3, 2**20)  # as in `peak`
    gc.collect()
    before, samples, done = _resident("RssAnon"), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            samples.append(_resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        done.set()
        watcher.join()
    return max(samples) - before


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024
