"""How a process ends: a refusal prints one line, a failure its traceback; each has its exit status.

When several ranks fail, all but the first fail because that one is gone. Who has started them finds the first: our launcher
by the reports that they leave (`failures`), torchrun by the file that TORCHELASTIC_ERROR_FILE names.
"""

import atexit
import os
import sys
import time
import traceback
from typing import NoReturn

from titanplans.errors import RunError, UserError, as_line
from titanplans.training.launch.failures import REPORTS, leave_report
from titanplans.versions import blamed


def say(words: str) -> None:
    """Print to stderr at once."""
    print(words, file=sys.stderr, flush=True)


def refuse(error: UserError | RunError, rank: int) -> int:
    """Say the error on one line; return 2 where the job can't be run, 1 where it can't go on.

    A rank of our launcher leaves it for that. Under torchrun, ranks other than 0 print it only if rank 0 has not ended the
    job.
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
    """Report `error` with its traceback and return 1. Call it in the `except` block that handles `error`.

    Of a rank that our launcher or torchrun has started, these print it.
    """
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
