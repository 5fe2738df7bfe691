"""How a process ends: a refusal prints one line, a failure prints its traceback, and each has its exit status.

When several ranks fail, usually the first failure causes the others, so the launcher prints only the first one.
titanplans' launcher finds it in the ranks' report files (`failures`), torchrun in the files that TORCHELASTIC_ERROR_FILE
names.
"""

import atexit
import json
import os
import signal
import sys
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, NoReturn

from titanplans.errors import RunError, UserError, as_line
from titanplans.versions import describe_untested

REPORTS = "TITANPLANS_REPORTS"
"""The environment variable that names the folder of report files, set for ranks that our launcher has started."""


def say(text: str) -> None:
    """Print to stderr and flush."""
    print(text, file=sys.stderr, flush=True)


def refuse(error: UserError | RunError, rank: int) -> int:
    """Report the error in one line; return exit status 2 for a `UserError`, 1 for a `RunError`."""
    line = as_line(f"{error}{describe_untested(error)}")
    if REPORTS in os.environ:
        leave_report(rank, line=line)
    elif rank == 0:
        say(f"error: {line}")
    else:
        # Rank 0 usually has the same error, and torchrun stops this rank once rank 0 has exited. If it does not, this rank
        # prints the error.
        time.sleep(3.0)
        say(f"error: rank {rank}: {line}")
    return 1 if isinstance(error, RunError) else 2


def fail(error: Exception, rank: int) -> int:
    """Report `error` with its traceback; return exit status 1. Call this in the `except` block that handles `error`."""
    # Only the first line is used: libraries add advice and C++ stack frames to their messages.
    summary = f"{type(error).__name__}: {error}".strip().partition("\n")[0] + describe_untested(error)
    lines = "".join(traceback.format_exception(error))
    if REPORTS in os.environ:
        leave_report(rank, how=f"failed: {summary}", traceback=lines)
    elif "TORCHELASTIC_ERROR_FILE" in os.environ:
        # Imported here, so that a mistake in a TOML file is reported without importing torch.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        # torchrun orders failures by time in whole seconds. This rank waits a second before it exits. Ranks that fail
        # because this rank has exited then have a later time.
        time.sleep(1.0)
        get_error_handler().record_exception(error)
    else:
        say(f"rank {rank}: {lines.rstrip()}")
        say(f"error: rank {rank} failed: {summary}")
    return 1


def mute_stdout() -> None:
    """Discard further output to stdout, e.g. because its reader has closed it, as `| head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def finish(status: int) -> NoReturn:
    """Run the exit handlers and end the process without freeing its objects.

    Freeing them takes two seconds once the model libraries are imported.
    """
    # For example, the exit handler of W&B, and the data loader's, which ends its workers. Python has no public function for
    # this.
    atexit._run_exitfuncs()
    exit_now(status)


def exit_now(status: int) -> NoReturn:
    """End the process without Python's finalization, which would wait for threads that wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Failure(NamedTuple):
    """A rank whose exit status is not 0."""

    rank: int
    pid: int | None
    status: int
    """The process's exit code; negative: the signal that killed it."""
    how: str
    """How it ended, as the end of a sentence: "was killed by SIGTERM"."""
    time: int = 0
    """When the rank wrote its report, in nanoseconds; 0: it wrote none."""
    line: str = ""
    """The message of a `UserError` or `RunError`; for other errors there is a traceback."""
    traceback: str = ""


def leave_report(rank: int, *, how: str = "", line: str = "", traceback: str = "") -> None:
    """Write this rank's report file, which `failures` reads, to the folder that REPORTS names."""
    path = Path(os.environ[REPORTS]) / f"rank_{rank}.json"
    report = {"time": time.time_ns(), "how": how, "line": line, "traceback": traceback}
    # Renamed when complete: the launcher may read it at any time.
    path.with_suffix(".writing").write_text(json.dumps(report))
    path.with_suffix(".writing").rename(path)


def failures(processes: list[BaseProcess], folder: Path) -> list[Failure]:
    """Return the ranks that have failed, beginning with the one to report."""
    failed = []
    for rank, process in enumerate(processes):
        if status := process.exitcode:
            path = folder / f"rank_{rank}.json"
            report = json.loads(path.read_text()) if path.exists() else {"how": describe_exit(status)}
            failed.append(Failure(rank, process.pid, status, **report))
    # A rank that was killed leaves no report and has time 0. It counts as the first, since the other ranks fail once it is
    # gone.
    failed.sort(key=lambda failure: failure.time)
    if failed and failed[0].line:
        # Errors in one line are usually the same on all ranks: report the error of the lowest rank.
        failed.sort(key=lambda failure: (not failure.line, failure.rank))
    return failed


def is_decided(failed: list[Failure]) -> bool:
    """Return whether `failed[0]` is certainly the failure to report, whatever happens to the ranks that still run."""
    return failed[0].time == 0 or (failed[0].line != "" and failed[0].rank == 0)


def describe_exit(status: int) -> str:
    """Return how a process with this exit code ended, as the end of a sentence."""
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL (by the system, if memory ran out)"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status > 128:
        return f"was stopped by {signal.Signals(status - 128).name}"
    return f"ended with exit status {status}"
