"""`launch`: start the ranks of a job on this machine without torchrun, and restart them if one fails.

`launch_function` starts ranks that run a function.

There is one process per rank, with the environment variables that torchrun sets. Jobs on several machines need torchrun.
"""

import contextlib
import importlib
import math
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import TCPStore

from titanplans.config import JobConfig
from titanplans.config.families import names_code
from titanplans.errors import UserError
from titanplans.parallel.mesh.process_group import default_device_type
from titanplans.training.checkpoint.folder import checkpoint_folder
from titanplans.training.launch.exit_status import REPORTS, Failure, failures, finish, is_decided, say
from titanplans.training.launch.orphans import end_with_parent
from titanplans.training.launch.rank import run_rank
from titanplans.training.launch.signals import Stopped, stop_on_signals

_GRACE_SECONDS = 2.0
"""How long the other ranks may take to end after one has failed: first by themselves, and then as long again after
SIGTERM."""
_POLL_SECONDS = 0.02
_HOST = "127.0.0.1"


def local_ranks(job: JobConfig) -> int:
    """Return the number of ranks to start on this machine: the product of the degrees.

    `data_parallel_shard_degree = -1` uses all GPUs that the other degrees leave free. On a CPU, and under DDP, -1 counts
    as 1.

    Raises:
        UserError: the degrees need more GPUs than this machine has.
    """
    from titanplans.training.job.resolve import fewest_processes

    ranks = fewest_processes(job)
    if default_device_type() == "cpu":
        return ranks
    gpus = torch.accelerator.device_count()
    if job.parallelism.shard_degree == -1:
        ranks *= max(1, gpus // ranks)
    if ranks > gpus:
        raise UserError(
            f"[parallelism] the degrees multiply to {ranks} ranks, but this machine has {gpus} GPUs: "
            "lower a degree, or start the job on several machines with torchrun"
        )
    return ranks


def launch(job: JobConfig, ranks: int, restarts: int = 0, evaluated_checkpoint: Path | None = None) -> int:
    """Run a checked job and return its exit status.

    When a rank fails, the other ranks are stopped. The rank that failed first is reported with its traceback, each of the
    other ranks in one line.

    Args:
        job: the job, which has been checked.
        ranks: number of processes to start.
        restarts: how often to restart all ranks after one has failed or was killed. There is no restart after an error that
            would occur again: a job that can't be run, a loss that is not finite, a full disk.
        evaluated_checkpoint: a checkpoint to validate instead of training.

    Raises:
        Stopped: SIGINT or SIGTERM arrived; all processes have ended.
    """
    # Imported here, since a spawned rank imports this file before it has set up logging, and the libraries log on import.
    from titanplans.training.checkpoint.resume import decide_resume

    # The launcher hosts the store, so that it outlives every rank and its port is known before they start.
    store = _local_store()
    method = start_method(job)
    if method == "fork":
        # Import the trainer once here: forked ranks then have it already.
        importlib.import_module("titanplans.training.trainer.trainer")
    run = partial(run_rank, job, evaluated_checkpoint)
    for restarts_left in range(restarts, -1, -1):
        try:
            stop_requested, failed = _run_ranks(
                run, ranks, restarts - restarts_left, store.port, method, job.checkpoint.save_on_signal
            )
        except Stopped as stopped:
            say(f"stopped by {stopped}; saved checkpoints are intact")
            stopped.is_reported = True
            raise
        if not failed:
            return 0
        if failed[0].line or stop_requested or not restarts_left:
            break
        description = _describe(failed[0])
        resume = decide_resume(job, checkpoint_folder(job), restarted=True)
        if resume.is_finished:
            say(f"{description} after {resume.source} was saved: the job is finished")
            return 0
        origin = "the newest checkpoint" if job.checkpoint.enable else "step 1, as checkpoint.enable = false"
        say(f"{description}: all ranks are restarted from {origin}; {restarts_left - 1} restarts left")
    resume_hint = ". Saved checkpoints are intact: the same command resumes from the newest one"
    return _report(failed, resume_hint if job.checkpoint.enable else "")


def launch_function(run: Callable[[], int], ranks: int) -> int:
    """Run a function on new ranks of this machine, which import what it needs; return the exit status.

    Args:
        run: a function that can be pickled, and returns the exit status of its rank.
        ranks: number of processes to start.

    Raises:
        Stopped: SIGINT or SIGTERM arrived; all processes have ended.
    """
    store = _local_store()
    _, failed = _run_ranks(run, ranks, 0, store.port, "spawn")
    return _report(failed) if failed else 0


def _report(failed: list[Failure], hint: str = "") -> int:
    """Print why ranks failed, the first one with its traceback; return the exit status."""
    first = failed[0]
    if first.line:
        say(f"error: rank {first.rank}: {first.line}" if first.rank else f"error: {first.line}")
        return first.status
    if first.traceback:
        say(f"rank {first.rank}: {first.traceback.rstrip()}")
    for failure in failed[1:]:
        say(f"rank {failure.rank} {failure.how}")
    say(f"error: {_describe(first)}; the other ranks were stopped{hint}")
    return 1


def _describe(failure: Failure) -> str:
    return f"rank {failure.rank} (pid {failure.pid}) {failure.how}"


def _local_store() -> TCPStore:
    """Return a store that only this machine can reach."""
    # TCPStore has no authentication, and by default listens on all interfaces. So it gets a socket bound to localhost.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind((_HOST, 0))
    port = listening.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _run_ranks(
    run: Callable[[], int],
    ranks: int,
    restart: int,
    port: int,
    method: Literal["fork", "spawn"],
    forwards_sigterm: bool = False,
) -> tuple[bool, list[Failure]]:
    """Start the ranks and wait until all have ended; return whether SIGTERM arrived, and what `failures` returns.

    Raises:
        Stopped: SIGINT or SIGTERM arrived; all processes have ended.
    """
    stop_requested = threading.Event()
    processes: list[BaseProcess] = []

    def forward_sigterm() -> None:
        stop_requested.set()
        for process in processes:
            process.terminate()

    # Not a TemporaryDirectory: its finalizer would also run in a forked rank that exits, and remove the folder.
    folder = tempfile.mkdtemp(prefix="titanplans-")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        request = forward_sigterm if forwards_sigterm else None
        stack.enter_context(stop_on_signals(first_sigterm=request))
        context: Any = multiprocessing.get_context(method)
        rank_args = (run, ranks, restart, port, folder, os.getpid())
        try:
            # Signals are blocked while ranks start: a fork has the handlers of its parent until it resets them.
            previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            try:
                for rank in range(ranks):
                    process = context.Process(target=_rank_process, args=(rank, *rank_args))
                    process.start()
                    processes.append(process)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
            if stop_requested.is_set():
                forward_sigterm()  # ranks that started after the signal have not received it
            _wait_until(processes, lambda codes: any(codes) or None not in codes)
            failed = failures(processes, Path(folder))
            if failed and not is_decided(failed):
                # Another rank may have failed first, and still be writing its report.
                _wait_until(processes, lambda codes: None not in codes, _GRACE_SECONDS)
                failed = failures(processes, Path(folder))
        except Stopped:
            # Longer than the 5 seconds that `stop_on_signals` allows a rank.
            _terminate(processes, 3 * _GRACE_SECONDS)
            raise
        _terminate(processes, _GRACE_SECONDS)
        return stop_requested.is_set(), failed


def start_method(job: JobConfig) -> Literal["fork", "spawn"]:
    """Return how to start the ranks: by fork if that is safe, else by spawn, after which each rank imports the libraries
    (9 s)."""
    # A fork lacks its parent's threads, and code of the user may have started some.
    has_user_code = job.experimental.custom_import or job.model.class_ or names_code(job.model.plan)
    # A fork can use neither an accelerator that its parent has queried, nor macOS's system libraries.
    can_fork = sys.platform == "linux" and default_device_type() == "cpu" and not has_user_code
    return "fork" if can_fork else "spawn"


def _rank_process(
    local_rank: int,
    run: Callable[[], int],
    ranks: int,
    restart: int,
    port: int,
    folder: str,
    launcher: int,
) -> None:
    """Run one rank in this process, with torchrun's environment: https://docs.pytorch.org/docs/stable/elastic/run.html."""
    end_with_parent(launcher)
    # A forked rank inherits its parent's signal handlers. They would write the rank's signals to the pipe that the
    # parent's thread reads.
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    os.environ.update(
        RANK=str(local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR=_HOST,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(restart),
        **{REPORTS: folder},
    )
    if Path("/sys/class/net/lo").exists():
        # By default gloo binds to the address of the host's name, which other machines may reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    finish(run())


def _wait_until(
    processes: list[BaseProcess], is_enough: Callable[[list[int | None]], bool], seconds: float = math.inf
) -> None:
    """Wait until `is_enough` accepts the exit codes (None: still running), but at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_enough([process.exitcode for process in processes]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _terminate(processes: list[BaseProcess], seconds: float) -> None:
    """Send SIGTERM to the processes, and SIGKILL to those that still run after `seconds`."""
    for process in processes:
        process.terminate()
    _wait_until(processes, lambda codes: None not in codes, seconds)
    for process in processes:
        process.kill()
        process.join()
