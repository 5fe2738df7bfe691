"""How a process tells how it ended: a refusal in one line, a failure with its traceback.

On one rank or many, each thing is told once, and by the rank that knows it first.
"""

import os
import sys
import time
import traceback
from typing import NoReturn

from titanplans.errors import UserError

# What gloo and NCCL say on a rank whose peer is gone, as opposed to one where something went wrong.
_PEER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
)


def refuse(error: UserError, rank: int) -> int:
    """Say on one line what can't be done, and return 2. Other ranks than 0 speak only if 0 does not."""
    if rank != 0:
        # Rank 0 mostly has the same error; the launcher stops this rank as soon as it has exited.
        time.sleep(3.0)
    print(f"error: {error}" if rank == 0 else f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
    return 2


def fail(error: Exception, rank: int) -> int:
    """Print what went wrong on this rank, with its traceback, and return 1."""
    gone = [text for text in _PEER_IS_GONE if text in str(error)]
    if gone:
        print(f"rank {rank}: lost another rank ({gone[0]})", file=sys.stderr, flush=True)
        time.sleep(1.0)  # so that the launcher sees the other one's end first, and names it
        return 1
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # for torchrun's report
        # Not at the top: a mistake in a TOML file is told without waiting for torch to be imported.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    text = "".join(traceback.format_exception(error))
    print(f"rank {rank}: {text}", file=sys.stderr, end="", flush=True)
    return 1


def exit_now(status: int) -> NoReturn:
    """End the process without Python's clean-up, which would wait for threads that wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
