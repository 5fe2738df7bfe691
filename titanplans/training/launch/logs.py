"""`init_logging`: print rank 0's progress and the warnings and errors of all ranks; hide the progress of other
libraries."""

import logging
import os
import sys
import threading

from titanplans.disk import is_refusal, name_file_in_errors
from titanplans.quiet import silence
from titanplans.training.launch.exit_status import mute_stdout

# Records of torchtitan that are not shown, by the file and the function that logs them. torchtitan logs through the root
# logger, so its records can't be told apart by logger.
_HIDDEN = {
    ("utils", "collect"),  # a line for every garbage collection; debug.gc_debug is the option for that
}


def init_logging(rank: int) -> None:
    """Log to stdout: INFO and above on rank 0, WARNING and above on the others, with the rank as prefix.

    Call this before the libraries are imported, since some log on import.
    """
    handler = _StdoutHandler(sys.stdout)
    prefix = "" if rank == 0 else f"rank {rank}: "
    handler.setFormatter(logging.Formatter(f"%(asctime)s  {prefix}%(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_is_shown)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    silence(training=rank == 0)
    # DTensor's logger warns of redistributions in several steps, which only authors of libraries can act on. torch's loggers
    # have their own handler and don't propagate, so `_is_shown` would not see these records.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    threading.excepthook = _thread_excepthook
    os.environ["KINETO_LOG_LEVEL"] = "5"  # silences the profiler's native log


class _StdoutHandler(logging.StreamHandler):
    """Writes to stdout. A closed stdout does not end the job, but a full disk does."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, BrokenPipeError):
            mute_stdout()
            print("stdout was closed: the job continues without its log", file=sys.stderr)
        elif not is_refusal(error):
            super().handleError(record)
        elif threading.current_thread() is threading.main_thread():
            # Raise only in the main thread. The threads that save and remove checkpoints should finish their work, and the
            # main thread gets the same error when it logs its next line.
            mute_stdout()  # buffered output would fail again when the process exits
            with name_file_in_errors("stdout"):
                raise


def _thread_excepthook(args: threading.ExceptHookArgs) -> None:
    # A full disk in TensorBoard's thread also raises in the main thread, which reports it in one line.
    if not (is_refusal(args.exc_value) and type(args.thread).__module__.startswith("tensorboard.")):
        threading.__excepthook__(args)


def _is_shown(record: logging.LogRecord) -> bool:
    """Return whether a record is printed."""
    if record.levelno >= logging.ERROR:
        return True
    if record.name == "root":
        return (record.module, record.funcName) not in _HIDDEN
    if record.levelno >= logging.WARNING:
        # torchao warns of CUDA libraries that can't be loaded, even where none is needed.
        return record.name != "torchao"
    return record.name.partition(".")[0] == "titanplans"
