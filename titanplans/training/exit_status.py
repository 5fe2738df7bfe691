"""How a process ends: a refusal prints one line, a failure its traceback; each has its exit status.

When several ranks fail, all but the first fail because that one is gone. The launcher (`titanplans.training.launch` or
torchrun) finds the first: each rank writes its exception to the file that TORCHELASTIC_ERROR_FILE names.
"""

import atexit
import os
import sys
import time
import traceback
from typing import NoReturn

from titanplans.errors import RunError, UserError, as_line

SAID = 3
"""How one of several ranks ends that has said why in its one line, to whoever started them."""


def refuse(error: UserError | RunError, rank: int) -> int:
    """Print the error on one line and return 2. Ranks other than 0 print it only if rank 0 has not ended the job."""
    if rank != 0:
        # Rank 0 mostly has the same error; the launcher stops this rank as soon as it has exited.
        time.sleep(3.0)
    line = as_line(str(error))
    print(f"error: {line}" if rank == 0 else f"error: rank {rank}: {line}", file=sys.stderr, flush=True)
    return 2


def fail(error: Exception, rank: int) -> int:
    """Report `error` with its traceback and return 1. Call it in the `except` block that handles `error`.

    A rank that torchrun or `titanplans.training.launch` started writes it to the error file, which they print.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        # Not at the top: a mistake in a TOML file is reported without importing torch.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        # Ranks that fail because this one is gone do so once it has ended. torchrun orders failures by whole seconds.
        time.sleep(1.0)
        get_error_handler().record_exception(error)
    else:
        print(f"rank {rank}: {''.join(traceback.format_exception(error))}", file=sys.stderr, end="")
        print(f"error: rank {rank} failed: {one_line(f'{type(error).__name__}: {error}')}", file=sys.stderr)
    return 1


def one_line(text: str) -> str:
    """Return the first line of a message, which libraries continue with advice and stack frames."""
    return text.strip().partition("\n")[0]


def mute_stdout() -> None:
    """Send what is still printed nowhere: who read stdout has closed it, as `| head` does."""
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
