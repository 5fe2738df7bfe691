"""Start the ranks of a job on this machine, where torchrun has not started them, and start them again if one fails.

One process per rank, each with the environment that torchrun would give it. When one fails, the others are stopped; the
rank that failed first is reported with its traceback, the others in a line each. Jobs on several machines need torchrun.
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
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import TCPStore

from titanplans.config import JobConfig
from titanplans.errors import UserError
from titanplans.parallel.mesh.process_group import default_device_type
from titanplans.training.checkpoint.folder import own_folder
from titanplans.training.launch.exit_status import REPORTS, Failure, failures, finish, is_decided, say
from titanplans.training.launch.orphans import end_with_parent
from titanplans.training.launch.rank import run_rank
from titanplans.training.launch.signals import Stopped, stop_on_signals

# How long the other ranks may take to end by themselves, where the first may be one of them, and then after SIGTERM.
_GRACE_SECONDS = 2.0
_SECONDS_TO_LOOK = 0.02
_HOST = "127.0.0.1"


def local_ranks(job: JobConfig) -> int:
    """Return the number of processes to start here: the product of the degrees.

    `data_parallel_shard_degree = -1` takes the GPUs that the other degrees leave. On a CPU and under DDP it counts as 1.

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


def launch(job: JobConfig, ranks: int, restarts: int = 0, evaluated: Path | None = None) -> int:
    """Run `job`, which has been checked, in that many processes; return its exit status.

    With `evaluated`, a checkpoint, it is validated and nothing is trained.

    After one has failed or was killed, all are started again, so many `restarts`; but not after an end in one line: a job
    that can't be run, a loss that is not finite, a disk that is full.

    Raises:
        Stopped: SIGINT or SIGTERM arrived; all processes have ended.
    """
    # Not at the top: a rank that is a new process imports this file, before it knows what of the libraries' words to show.
    from titanplans.training.checkpoint.resume import decide_resume

    # The store lives here, so that it outlives every rank and its port is known before they start.
    store = _local_store()
    method = start_method(job)
    if method == "fork":
        importlib.import_module("titanplans.training.trainer.trainer")  # the Trainer, once for all
    for left in range(restarts, -1, -1):
        asked, failed = _run_ranks(job, ranks, restarts - left, store.port, method, evaluated)
        if not failed:
            return 0
        first = failed[0]
        if first.line:
            say(f"error: rank {first.rank}: {first.line}" if first.rank else f"error: {first.line}")
            return first.status
        which = f"rank {first.rank} (pid {first.pid}) {first.how}"
        if asked or not left:
            break
        resume = decide_resume(job, own_folder(job), restarted=True)
        if resume.is_finished:
            say(f"{which} after {resume.source} was saved: the job is finished")
            return 0
        origin = "the newest checkpoint" if job.checkpoint.enable else "step 1, as checkpoint.enable = false"
        say(f"{which}: all ranks start again, from {origin}; {left - 1} restarts left")
    if first.traceback:
        say(f"rank {first.rank}: {first.traceback.rstrip()}")
    for failure in failed[1:]:
        say(f"rank {failure.rank} {failure.how}")
    resumes = ". Finished checkpoints are complete: the same command resumes from the newest"
    say(f"error: {which}; the other ranks were stopped{resumes if job.checkpoint.enable else ''}")
    return 1


def _local_store() -> TCPStore:
    """Return a store that only this machine can reach: whoever reaches it may write to it."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind((_HOST, 0))
    port = listening.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _run_ranks(
    job: JobConfig,
    ranks: int,
    restart: int,
    port: int,
    method: Literal["fork", "spawn"],
    evaluated: Path | None,
) -> tuple[bool, list[Failure]]:
    """Start the ranks and wait for their end; return whether SIGTERM arrived, and which failed."""
    asked = threading.Event()
    processes: list[BaseProcess] = []

    def forward_sigterm() -> None:
        asked.set()
        for process in processes:
            process.terminate()

    # No TemporaryDirectory: a fork that exits removes it.
    folder = tempfile.mkdtemp(prefix="titanplans-")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        request = forward_sigterm if job.checkpoint.save_on_signal else None
        stack.enter_context(stop_on_signals(first_sigterm=request))
        context: Any = multiprocessing.get_context(method)
        place = (job, ranks, restart, port, folder, os.getpid(), evaluated)
        try:
            # A signal that arrives meanwhile waits: a fork has the handlers of its parent.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            try:
                for rank in range(ranks):
                    process = context.Process(target=_rank_process, args=(rank, *place))
                    process.start()
                    processes.append(process)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if asked.is_set():
                forward_sigterm()  # to those that had not started
            _wait_until(processes, lambda codes: any(codes) or None not in codes)
            failed = failures(processes, Path(folder))
            if failed and not is_decided(failed):
                _wait_until(processes, lambda codes: None not in codes, _GRACE_SECONDS)
                failed = failures(processes, Path(folder))
        except Stopped as stopped:
            _terminate(processes, 3 * _GRACE_SECONDS)  # they have 5 seconds to finish what they write
            say(f"stopped by {stopped}; finished checkpoints are complete")
            stopped.said = True
            raise
        _terminate(processes, _GRACE_SECONDS)
        return asked.is_set(), failed


def start_method(job: JobConfig) -> Literal["fork", "spawn"]:
    """Return how ranks are started: forked from this process, or as new ones, which import the libraries (9 s each).

    A fork can't use an accelerator that its parent has looked at, nor macOS's libraries. Its parent's threads are not in it:
    a job with code of the user's, which may have started some, is not forked.
    """
    users_code = job.experimental.custom_import or job.model.class_ or ":" in str(job.model.plan)
    forks = sys.platform == "linux" and default_device_type() == "cpu" and not users_code
    return "fork" if forks else "spawn"


def _rank_process(
    local_rank: int,
    job: JobConfig,
    ranks: int,
    restart: int,
    port: int,
    folder: str,
    launcher: int,
    evaluated: Path | None,
) -> None:
    """The environment is torchrun's: https://docs.pytorch.org/docs/stable/elastic/run.html."""
    end_with_parent(launcher)
    # A fork has its parent's handlers, and the pipe by which its parent is told of signals.
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
        # gloo takes the address of the host's name, which others may reach
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    finish(run_rank(job, evaluated))


def _wait_until(
    processes: list[BaseProcess], enough: Callable[[list[int | None]], bool], seconds: float = math.inf
) -> None:
    """Wait until `enough` accepts the exit codes (None: running), or until the time is over."""
    deadline = time.monotonic() + seconds
    while not enough([process.exitcode for process in processes]) and time.monotonic() < deadline:
        time.sleep(_SECONDS_TO_LOOK)


def _terminate(processes: list[BaseProcess], seconds: float) -> None:
    """End the processes by SIGTERM, and those left after some seconds by SIGKILL."""
    for process in processes:
        process.terminate()
    _wait_until(processes, lambda codes: None not in codes, seconds)
    for process in processes:
        process.kill()
        process.join()
