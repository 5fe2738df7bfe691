"""What reaches the screen: rank 0's progress, everybody's warnings.

torchtitan logs through the root logger. `init_logging` gives it one handler, a short format, and a
filter that keeps other libraries' chatter, and a few of torchtitan's lines, off the screen.
"""

import logging
import os
import sys
import warnings

# Lines of torchtitan's that are wrong or no news here, each with the reason why.
_NOT_SHOWN = (
    "Peak FLOPS used for computing MFU",  # the A100's, on a device without an entry; see titanplans.training.metrics
    "Peak flops undefined for",  # followed by that fallback
    "Error running lspci",  # which is how it tells an H100
    "ENV[TORCH_",  # variables that torchrun sets, too
    "[GC] ",  # every collection, with its time; gc_debug is the tool for that
    "Synchronizing and adjusting timeout",
    "Successfully created meshes",
    "Sleeping 2 seconds",
    "Destroying the purge thread",
    "Failed to load ",  # torchao's CUDA libraries, on a machine that does not need them
)
# Advice from library to library that the author of a job can't act on.
_MUTED_LOGGERS = (
    "torch.utils._pytree",
    "torch.distributed.tensor._redistribute",
    "torch.multiprocessing.spawn",  # which rank it stops, and by which signal; titanplans.training.launch says why
)
_MUTED_WARNINGS = (
    "'set_vital' is deprecated",  # torchdata calls torch
    "Triton is not supported on current platform",  # FLA on a CPU, where titanplans.modeling.kernels takes its place
)


def init_logging(rank: int) -> None:
    """Log to stdout: INFO and above on rank 0, warnings with the rank's number on the others.

    Call it before the libraries are imported, some of which have something to say at once.
    """
    handler = logging.StreamHandler(sys.stdout)
    who = "" if rank == 0 else f"rank {rank}: "
    handler.setFormatter(logging.Formatter(f"%(asctime)s  {who}%(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_worth_showing)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for name in _MUTED_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in _MUTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    os.environ["KINETO_LOG_LEVEL"] = "5"  # the profiler's native log has its own switch; 5 is silent


def _worth_showing(record: logging.LogRecord) -> bool:
    ours = record.name == "root" or record.name.startswith(("training", "parallel"))
    if not ours and record.levelno < logging.WARNING:
        return False
    return not record.getMessage().startswith(_NOT_SHOWN)
