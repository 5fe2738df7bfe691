"""Which of several ranks failed first, and how each did, from what they leave behind.

A rank that our launcher has started leaves a report in the launcher's folder before it ends, and prints nothing: the
launcher prints the first, once. The others fail because that one is gone, so they write theirs later.
"""

import json
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

REPORTS = "TITANPLANS_REPORTS"
"""Names the folder of the reports, in the environment of a rank that our launcher has started."""


class Failure(NamedTuple):
    """A rank that failed by itself, and was not stopped by the launcher."""

    rank: int
    pid: int | None
    status: int
    """The process's exit code; negative: the signal that killed it."""
    how: str
    time: int = 0
    """When it wrote its report, in nanoseconds; 0: it wrote none."""
    line: str = ""
    """All that there is to say, of a job that can't be run or go on; else there is a traceback."""
    traceback: str = ""


def leave_report(rank: int, *, how: str = "", line: str = "", traceback: str = "") -> None:
    """Write what `failures` reads of this rank, in the folder that REPORTS names."""
    path = Path(os.environ[REPORTS]) / f"rank_{rank}.json"
    report = {"time": time.time_ns(), "how": how, "line": line, "traceback": traceback}
    path.with_suffix(".writing").write_text(json.dumps(report))
    path.with_suffix(".writing").rename(path)


def failures(processes: list[BaseProcess], folder: Path) -> list[Failure]:
    """Return the ranks that failed by themselves, the first to fail first.

    A rank that was killed leaves no report, so it counts as the first: its absence causes those of the others. Of those
    that have a line, which are mostly the same, the lowest rank's comes first.
    """
    found = []
    for rank, process in enumerate(processes):
        if status := process.exitcode:
            path = folder / f"rank_{rank}.json"
            report = json.loads(path.read_text()) if path.exists() else {"how": _how(status)}
            found.append(Failure(rank, process.pid, status, **report))
    found.sort(key=lambda failure: failure.time)
    if found and found[0].line:
        found.sort(key=lambda failure: (not failure.line, failure.rank))
    return found


def is_decided(found: list[Failure]) -> bool:
    """Whether no rank that still runs can turn out to be the one to report."""
    return found[0].time == 0 or (found[0].line != "" and found[0].rank == 0)


def _how(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL (by the system, if memory ran out)"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status > 128:
        return f"was stopped by {signal.Signals(status - 128).name}"
    return f"ended with exit status {status}"
