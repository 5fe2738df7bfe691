"""What reaches the screen: rank 0's progress, every rank's warnings and errors.

torchtitan logs through the root logger. `init_logging` gives it one handler, a short format, and a filter that keeps
other libraries' progress off the screen. An ERROR is always shown.
"""

import logging
import os
import sys
import threading

from titanplans.disk import is_refusal, naming
from titanplans.quiet import silence
from titanplans.training.launch.exit_status import mute_stdout

# torchtitan's own progress that is no news, by the file and the function that logs it, with the reason.
_NO_NEWS = {
    ("utils", "collect"),  # every garbage collection, with its time; gc_debug is the tool for that
}


def init_logging(rank: int) -> None:
    """Log to stdout: INFO and above on rank 0, warnings with the rank's number on the others.

    Call it before importing the libraries, since some log on import.
    """
    handler = _Screen(sys.stdout)
    who = "" if rank == 0 else f"rank {rank}: "
    handler.setFormatter(logging.Formatter(f"%(asctime)s  {who}%(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_worth_showing)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    silence(training=rank == 0)
    # Advice to libraries, by a handler of torch's own.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    threading.excepthook = _in_thread
    os.environ["KINETO_LOG_LEVEL"] = "5"  # the profiler's native log has its own switch; 5 is silent


class _Screen(logging.StreamHandler):
    """Where nobody reads stdout any more, the job goes on: a pager that is closed ends no training. A full disk does.

    Threads that save and remove checkpoints log, too; they go on with it, and the main thread's next line meets the same.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, BrokenPipeError):
            mute_stdout()
            print("stdout was closed: the job goes on without its log", file=sys.stderr)
        elif not is_refusal(error):
            super().handleError(record)
        elif threading.current_thread() is threading.main_thread():
            mute_stdout()  # what waits to be written would fail again at the end of the process
            with naming("stdout"):
                raise


def _in_thread(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread leaves its error to the main thread, too, which says in one line that the disk is full."""
    if not (is_refusal(args.exc_value) and type(args.thread).__module__.startswith("tensorboard.")):
        threading.__excepthook__(args)


def _worth_showing(record: logging.LogRecord) -> bool:
    """Decide by level and logger; torchtitan's functions share the root logger, so by function, too."""
    if record.levelno >= logging.ERROR:
        return True
    if record.name == "root":
        return (record.module, record.funcName) not in _NO_NEWS
    if record.levelno >= logging.WARNING:
        return record.name != "torchao"  # of CUDA libraries that can't be loaded, where none is needed
    return record.name.partition(".")[0] == "titanplans"
