"""The command `titanplans`, and its subcommands.

    titanplans train configs/gla_debug.toml          # train it, as train.py
    titanplans evaluate configs/gla_debug.toml       # loss of its checkpoint
    titanplans verify gla                            # prove a plan, on a CPU
    titanplans verify my_plans:MyPlan --model my_models:build
    titanplans derive exaone4                        # write a plan and prove it
    titanplans explain configs/gla_7B.toml           # how it is split
    titanplans estimate configs/gla_7B.toml --gpu H100   # its memory and time
    titanplans fit configs/gla_7B.toml --gpus 64xH100    # its fastest layouts
    titanplans data configs/gla_debug.toml           # what its model will see
    titanplans list                                  # the registered plans
    titanplans list gla                              # how it is split
    titanplans async-tp gla --tp 2                   # what async TP would fuse
    titanplans sweep configs/experiments/tp_variants.toml   # a grid of jobs
    titanplans plot outputs/gla_debug                # curves of runs or a sweep
    titanplans check outputs/gla_debug/checkpoint    # whether files are damaged
    titanplans export outputs/gla_debug/checkpoint/step-50 gla-50
                                                     # to a Hugging Face folder
    titanplans import Qwen3-0.6B seed                # from one, to start from

Each command's own options: `titanplans COMMAND --help`. Versions:
`titanplans --version`. Exit status: 0 done, 1 failed or proved wrong, 2 it
can't be done as written (one line says why), 128 + N stopped by signal N.
"""

import os
import select
import signal
import sys
import threading
from importlib import import_module
from types import TracebackType
from typing import NoReturn

from titanplans.disk import is_refusal, reason
from titanplans.errors import RunError, UserError, as_line, did_you_mean
from titanplans.extras import as_missing_library
from titanplans.quiet import silence
from titanplans.training.launch.exit_status import exit_now, finish, mute_stdout, refuse
from titanplans.training.launch.signals import Stopped
from titanplans.versions import describe_untested, versions

COMMANDS = {
    "train": "training.launch.main",
    "evaluate": "cli.evaluate",
    "verify": "cli.verify.main",
    "derive": "cli.derive",
    "explain": "cli.explain",
    "estimate": "cli.estimate",
    "fit": "cli.fit",
    "data": "cli.data",
    "list": "cli.verify.main",
    "async-tp": "cli.verify.main",
    "sweep": "cli.sweep",
    "plot": "cli.plot",
    "check": "cli.check",
    "export": "cli.export",
    "import": "cli.export",
}
"""The module of each command. Its `main` gets the arguments; if a module has several commands, the command comes first."""


def run(argv: list[str] | None = None) -> NoReturn:
    """Run the command of `argv`, by default of the command line, and end the process with its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    silence(training=argv[:1] in (["train"], ["evaluate"]))
    if not sys.flags.safe_path:
        # Add the current folder, for the user's plans. An installed command has its own folder in sys.path instead.
        sys.path.append("")
    proves = argv[:1] in (["verify"], ["derive"], ["list"], ["async-tp"])
    # These variables are read when torch and Triton are imported.
    if proves and {"real", "--kernels=real"} & set(argv):
        os.environ["TRITON_INTERPRET"] = "1"
    if proves and {"cuda", "--device=cuda", "--process-group"} & set(argv):
        # Otherwise Triton's dot products round float32 to TF32, which has 10 mantissa bits instead of 23.
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    # A proof runs eagerly. Libraries compile functions at import time, which would import the compiler needlessly.
    # async-tp needs the compiler's graphs.
    if proves and argv[0] != "async-tp" and "--process-group" not in argv:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.excepthook = _report
    try:
        status = main(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        mute_stdout()
        status = 128 + signal.SIGPIPE
    except OSError as error:
        if not is_refusal(error):
            raise
        mute_stdout()  # Python flushes it again at exit
        print(f"error: {error.filename or 'stdout'} can't be written ({reason(error)})", file=sys.stderr)
        status = 1
    if proves:
        exit_now(status)
    has_writers = any(
        not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()
    )
    if status == 0 or not has_writers:
        finish(status)
    sys.exit(status)  # waits for threads that write a checkpoint


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if words := describe_untested(error):
        error.add_note(words.strip(" ()"))
    sys.__excepthook__(kind, error, trace)


def _stdout_is_closed() -> bool:
    """Whether the reader of stdout has closed it, as `| head` does."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))  # poll always reports errors, whatever events are registered


def main(argv: list[str]) -> int:
    """Run the command `argv[0]` with the arguments after it; return the exit status.

    Only the module of that command is imported, so that `--help` and a misspelled command need no torch.
    """
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__)
        return 0
    if command == "--version":
        print(versions())
        return 0
    if command in COMMANDS:
        try:
            module = import_module(f"titanplans.{COMMANDS[command]}")
            has_several = list(COMMANDS.values()).count(COMMANDS[command]) > 1
            return module.main(argv if has_several else rest)
        except ModuleNotFoundError as error:
            if (missing := as_missing_library(error, f"titanplans {command}")) is None:
                raise
            return refuse(missing, int(os.environ.get("RANK", "0")))
        except (UserError, RunError) as error:
            return refuse(error, int(os.environ.get("RANK", "0")))
        except KeyboardInterrupt as error:
            stopped = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
            if not stopped.is_reported:
                print(f"stopped by {stopped}", file=sys.stderr)
            return stopped.exit_status
    print(as_line(f"error: {command}: no such command; {did_you_mean(command, COMMANDS)}"), file=sys.stderr)
    return 2
