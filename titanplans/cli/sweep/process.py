"""Run one cell as a process: start it, stop it at its time limit or with the sweep, and return how it ended.

Its output goes to `log.txt` in its folder. `titanplans.cli.sweep.table` reads what it measured.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

from titanplans.cli.sweep.cells import Cell
from titanplans.training.launch.orphans import end_with_parent
from titanplans.training.launch.signals import Stopped, stop_on_signals

LOG = "log.txt"
TRAIN = [sys.executable, "-m", "titanplans", "train"]
"""What a cell's arguments are appended to."""

# A job ends within some 10 s of a signal (training/launch/); then it is killed.
_SECONDS_TO_STOP = 20.0


def run_cell(cell: Cell, time_limit: float | None) -> dict[str, Any]:
    """Run the cell's job, and wait until all its processes have ended. It is killed if the sweep is.

    Returns:
        `state`, `exit_status` (negative: the signal that killed it), `line` and `seconds` of the cell's record.

    Raises:
        Stopped: a signal stopped the sweep, and the job with it.
    """
    start, path = time.perf_counter(), cell.folder / LOG
    with path.open("a") as log:
        offset = log.tell()
        process = subprocess.Popen(
            [*TRAIN, *cell.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=partial(end_with_parent, os.getpid()),
            start_new_session=True,  # Ctrl-C on the terminal reaches the sweep, and the job once, through it
        )
    try:
        with stop_on_signals():
            status = process.wait(timeout=time_limit)
        state = {0: "finished", 2: "refused"}.get(status, "failed")
        text = path.read_bytes()[offset:].decode(errors="replace")
        line = None if status == 0 else error_line(text, status)
    except subprocess.TimeoutExpired:
        status = _stop(process, signal.SIGTERM)
        state, line = "failed", f"stopped at [sweep] time_limit_seconds = {time_limit:g}"
    except Stopped:
        _stop(process, signal.SIGINT)
        raise
    seconds = round(time.perf_counter() - start, 1)
    return {"state": state, "exit_status": status, "line": line, "seconds": seconds}


def _stop(process: subprocess.Popen, signum: int) -> int:
    """Send the signal, which the job hands on to its ranks; kill all of them if that does not end it."""
    try:
        process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_SECONDS_TO_STOP)
    finally:  # after a second Ctrl-C, too; if the job ended in order, its session is empty
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def error_line(text: str, status: int) -> str:
    """Return why a job with this output and exit status ended: the signal that killed it, or its last error line."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1]
