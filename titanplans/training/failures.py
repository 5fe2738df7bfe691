"""Which of several ranks failed first, and how each did, from what they leave behind."""

import json
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from titanplans.training.exit_status import one_line


class Failure(NamedTuple):
    """A rank that failed by itself, and was not stopped by the launcher."""

    rank: int
    status: int
    """The process's exit code; negative: the signal that killed it."""
    time: float
    """When it wrote its exception to the file, in seconds; 0: it wrote none."""
    how: str
    traceback: str


def error_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes its exception."""
    return folder / f"rank_{rank}.json"


def failures(processes: list[BaseProcess], folder: Path) -> list[Failure]:
    """Return the ranks that failed by themselves, the first to fail first.

    A rank that was killed or refused the job writes no exception, so it counts as the first: its absence causes those of
    the others.
    """
    found = []
    for rank, process in enumerate(processes):
        status, file = process.exitcode, error_file(folder, rank)
        if not status:
            continue
        if not file.exists():
            found.append(Failure(rank, status, 0.0, _how(status), ""))
            continue
        left = json.loads(file.read_text())["message"]
        how = f"failed: {one_line(left['message'])}"
        found.append(Failure(rank, status, file.stat().st_mtime, how, left["extraInfo"]["py_callstack"]))
    return sorted(found, key=lambda failure: failure.time)


def _how(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL (by the system, if memory ran out)"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status > 128:
        return f"was stopped by {signal.Signals(status - 128).name}"
    return f"ended with exit status {status}"
