"""How a process ends: a refusal prints one line, a failure its traceback; each has its exit status.

When several ranks fail, all but the first fail because that one is gone. Who has started them finds the first, and prints it
once: our launcher by the reports that they leave in its folder (`failures`), torchrun by the file that
TORCHELASTIC_ERROR_FILE names.
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
from titanplans.versions import blamed

REPORTS = "TITANPLANS_REPORTS"
"""Names the folder of the reports, in the environment of a rank that our launcher has started."""


def say(words: str) -> None:
    """Print to stderr at once."""
    print(words, file=sys.stderr, flush=True)


def refuse(error: UserError | RunError, rank: int) -> int:
    """Say the error on one line; return 2 where the job can't be run, 1 where it can't go on.

    Under torchrun, ranks other than 0 print it only if rank 0 has not ended the job.
    """
    line = as_line(f"{error}{blamed(error)}")
    if REPORTS in os.environ:
        leave_report(rank, line=line)
    elif rank == 0:
        say(f"error: {line}")
    else:
        time.sleep(3.0)  # rank 0 mostly has the same error; torchrun stops this rank as soon as it has exited
        say(f"error: rank {rank}: {line}")
    return 1 if isinstance(error, RunError) else 2


def fail(error: Exception, rank: int) -> int:
    """Report `error` with its traceback and return 1. Call it in the `except` block that handles `error`."""
    # Libraries go on with advice and stack frames.
    what = f"{type(error).__name__}: {error}".strip().partition("\n")[0] + blamed(error)
    lines = "".join(traceback.format_exception(error))
    if REPORTS in os.environ:
        leave_report(rank, how=f"failed: {what}", traceback=lines)
    elif "TORCHELASTIC_ERROR_FILE" in os.environ:
        # Not at the top: a mistake in a TOML file is reported without importing torch.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        # Ranks that fail because this one is gone do so once it has ended. torchrun orders failures by whole seconds.
        time.sleep(1.0)
        get_error_handler().record_exception(error)
    else:
        say(f"rank {rank}: {lines.rstrip()}")
        say(f"error: rank {rank} failed: {what}")
    return 1


def mute_stdout() -> None:
    """Discard further output: the reader of stdout has closed it, as `| head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def finish(status: int) -> NoReturn:
    """End the process after its exit handlers, without freeing every object.

    Freeing takes two seconds of processor time once the model libraries are imported.
    """
    atexit._run_exitfuncs()  # W&B's, and those that end a data loader's workers
    exit_now(status)


def exit_now(status: int) -> NoReturn:
    """End the process without Python's clean-up, which would wait for threads that wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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
