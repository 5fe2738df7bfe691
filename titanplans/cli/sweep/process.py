"""Run one cell as a process: start it, stop it at its time limit or with the sweep, and return how it ended.

Its output goes to `log.txt` in its folder. `titanplans.cli.sweep.table` reads what it measured.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanplans.cli.sweep.cells import Cell
from titanplans.errors import UserError
from titanplans.training.launch.signals import Stopped, stop_on_signals

LOG = "log.txt"
TRAIN = [sys.executable, "-m", "titanplans", "train"]
"""What a cell's arguments are appended to."""

# A job ends within some 10 s of a signal (training/launch/); then it is killed.
_SECONDS_TO_STOP = 20.0


@contextlib.contextmanager
def only_sweep(folder: Path) -> Iterator[int]:
    """Lock the folder, and yield the lock's file descriptor.

    Jobs inherit the descriptor, so that a job which a killed sweep left running still holds the lock.

    Raises:
        UserError: another sweep runs there, or a job of one that was killed; or the folder can't be made or locked.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "lock").open("a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (folder / "lock").read_text()
            raise UserError(
                f"{folder}: another sweep runs here, or the job of one that was killed ({holder}); wait for it, or end it"
            ) from None
        except OSError as error:
            raise UserError(
                f"{folder}: can't be made and locked ({error.strerror}); give [sweep] a dump_folder that can"
            ) from None
        _write_holder(file.fileno(), "")
        yield file.fileno()


def _write_holder(lock: int, job: str) -> None:
    """Write who holds the lock, for the error that a second sweep gives."""
    os.ftruncate(lock, 0)
    os.write(lock, f"sweep {os.getpid()}{job}".encode())


def run_cell(cell: Cell, lock: int, time_limit: float | None) -> tuple[dict[str, Any], int | None]:
    """Run the cell's job, and wait until all its processes have ended.

    Args:
        cell: its log.txt is appended to.
        lock: descriptor that the process inherits.
        time_limit: seconds; None for none.

    Returns:
        `state`, `exit_status` (negative: the signal that killed it), `line` and `seconds` of the cell's record; and the
        signal that stopped the sweep, and the cell with it, or None.
    """
    start, process, signum = time.perf_counter(), None, None
    # A closed terminal stops the sweep, too: its signal does not reach the job's session. Under nohup it is ignored.
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else []
    with (cell.folder / LOG).open("a") as log:
        offset = log.tell()
        try:
            with stop_on_signals(*hangup):
                # A session of its own: Ctrl-C on the terminal reaches the sweep, and the job once, through it.
                process = subprocess.Popen(
                    [*TRAIN, *cell.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"PYTHONUNBUFFERED": "1"},
                    pass_fds=[lock],
                    start_new_session=True,
                )
                _write_holder(lock, f", job {process.pid}")
                status = process.wait(timeout=time_limit)
            state = {0: "finished", 2: "refused"}.get(status, "failed")
            text = (cell.folder / LOG).read_bytes()[offset:].decode(errors="replace")
            line = None if status == 0 else error_line(text, status)
        except subprocess.TimeoutExpired:
            assert process is not None
            status = _stop(process, signal.SIGTERM)
            state, line = "timed out", f"stopped at [sweep] time_limit_seconds = {time_limit:g}"
        except Stopped as stopped:
            status = 128 + stopped.signum if process is None else _stop(process, signal.SIGINT)
            state, line, signum = "stopped", f"stopped with the sweep, by {stopped}", stopped.signum
    seconds = round(time.perf_counter() - start, 1)
    return {"state": state, "exit_status": status, "line": line, "seconds": seconds}, signum


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
