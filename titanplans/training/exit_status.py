"""How a process ends: a refusal in one line, a failure with its traceback, and the exit status of each.

Where several ranks fail, all but one fail because another is gone. Which one was first is known to who started them
(`titanplans.training.launch`, or torchrun): a rank leaves its exception in the file that TORCHELASTIC_ERROR_FILE names.
"""

import atexit
import os
import sys
import time
import traceback
from typing import NoReturn

from titanplans.errors import UserError


def refuse(error: UserError, rank: int) -> int:
    """Say on one line what can't be done, and return 2. Other ranks than 0 speak only if 0 does not."""
    if rank != 0:
        # Rank 0 mostly has the same error; the launcher stops this rank as soon as it has exited.
        time.sleep(3.0)
    print(f"error: {error}" if rank == 0 else f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
    return 2


def fail(error: Exception, rank: int) -> int:
    """Tell what went wrong on this rank, with its traceback, and return 1. Call it where `error` is handled.

    A rank that was started by torchrun or by `titanplans.training.launch` leaves the telling to them.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        # Not at the top: a mistake in a TOML file is told without waiting for torch to be imported.
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


def finish(status: int) -> NoReturn:
    """End a process that is done: as Python does, but without freeing object by object what it holds.

    That takes two seconds of processor time once the model libraries are imported.
    """
    atexit._run_exitfuncs()  # W&B's, and those that end a data loader's workers
    exit_now(status)


def exit_now(status: int) -> NoReturn:
    """End the process without Python's clean-up, which would wait for threads that wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
