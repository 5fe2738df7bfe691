"""Start the ranks of a job on this machine, where torchrun has not started them.

One process per rank, each with the environment that torchrun would give it. When one fails, the others are stopped; the
rank that failed first is reported with its traceback, the others in a line each. Jobs on several machines need torchrun.
`run_rank` is what a rank does, whoever has started it: this file, torchrun, or nobody where there is one process only.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import multiprocessing
from torch.distributed import TCPStore

from titanplans.config import JobConfig
from titanplans.errors import RunError, UserError
from titanplans.parallel.process_group import default_device_type
from titanplans.training.device import prepare_device
from titanplans.training.exit_status import SAID, exit_now, fail, finish, one_line, refuse
from titanplans.training.logs import init_logging
from titanplans.training.signals import Stopped, stop_on_signals

# How long the other ranks may take to end by themselves, and then again after SIGTERM; then SIGKILL.
_GRACE_SECONDS = 2.0


def local_ranks(job: JobConfig) -> int:
    """Return the number of processes to start here: the product of the degrees.

    `data_parallel_shard_degree = -1` takes the GPUs that the other degrees leave. On a CPU and under DDP it counts as 1.

    Raises:
        UserError: the degrees need more GPUs than this machine has.
    """
    degrees, shards = job.parallelism, job.parallelism.shard_degree
    ranks = degrees.data_parallel_replicate_degree * degrees.tensor_parallel_degree
    ranks *= degrees.context_parallel_degree * degrees.pipeline_parallel_degree
    if default_device_type() == "cpu":
        return ranks * max(1, shards)
    gpus = torch.accelerator.device_count()
    ranks *= max(1, gpus // ranks) if shards == -1 else shards
    if ranks > gpus:
        raise UserError(
            f"[parallelism] the degrees multiply to {ranks} ranks, but this machine has {gpus} GPUs: "
            "lower a degree, or start the job on several machines with torchrun"
        )
    return ranks


def launch(job: JobConfig, ranks: int) -> int:
    """Run `job`, which has been checked, in that many processes; return its exit status.

    Raises:
        Stopped: SIGINT or SIGTERM arrived; all processes have ended.
    """
    # The store lives here, so that it outlives every rank and its port is known before they start.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    folder = Path(tempfile.mkdtemp(prefix="titanplans-"))
    method = start_method(job)
    if method == "fork":
        importlib.import_module("titanplans.training.job")  # the Trainer, once for all
    try:
        context = multiprocessing.start_processes(
            _run, args=(job, ranks, store.port, folder), nprocs=ranks, join=False, start_method=method
        )
        assert context is not None
        processes: list[BaseProcess] = context.processes
        try:
            if not any(_wait_for_all_or_a_failure(processes)):
                return 0
            _join(processes, _GRACE_SECONDS)
        except Stopped:
            _stop(processes, 3 * _GRACE_SECONDS)  # they have 5 seconds to finish what they write
            raise
        first, *others = _failures(processes, folder)
        _stop(processes, _GRACE_SECONDS)
    finally:
        shutil.rmtree(folder)
    if first.status in (2, SAID):  # which the rank has printed
        return 2 if first.status == 2 else 1
    if first.traceback:
        print(f"rank {first.rank}: {first.traceback}", file=sys.stderr, end="")
    for failure in others:
        print(f"rank {failure.rank} {failure.how}", file=sys.stderr)
    line = f"error: rank {first.rank} (pid {processes[first.rank].pid}) {first.how}; the other ranks were stopped"
    if job.checkpoint.enable:
        line += ". Finished checkpoints are complete: the same command resumes from the newest"
    print(line, file=sys.stderr)
    return 1


def start_method(job: JobConfig) -> Literal["fork", "spawn"]:
    """Return how ranks are started: forked from this process, or as new ones, each of which imports the libraries (9 s).

    A fork can't use an accelerator that its parent has looked at, nor macOS's libraries. Its parent's threads are not in it:
    a job with code of the user's, which may have started some, is not forked.
    """
    users_code = job.experimental.custom_import or ":" in str(job.model.plan)
    forks = sys.platform == "linux" and default_device_type() == "cpu" and not users_code
    return "fork" if forks else "spawn"


class _Failure(NamedTuple):
    """A rank that failed by itself, and was not stopped by the launcher."""

    rank: int
    status: int
    """The process's exit code; negative: the signal that killed it."""
    time: float
    """When it wrote its exception to the file, in seconds; 0: it wrote none."""
    how: str
    traceback: str


def _run(local_rank: int, job: JobConfig, ranks: int, port: int, folder: Path) -> None:
    """The environment is torchrun's: https://docs.pytorch.org/docs/stable/elastic/run.html."""
    signal.set_wakeup_fd(-1)  # a fork has its parent's, which is told of signals to the parent
    os.environ.update(
        RANK=str(local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_ERROR_FILE=str(_error_file(folder, local_rank)),
    )
    finish(run_rank(job))


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"


def _wait_for_all_or_a_failure(processes: list[BaseProcess]) -> list[int | None]:
    """Wait until one has failed or all have ended; return the exit codes."""
    while True:
        codes = [process.exitcode for process in processes]
        if any(codes) or None not in codes:
            return codes
        # Of those that ran a moment ago: asked anew, all may have ended, and waiting for none of them never ends.
        connection.wait([p.sentinel for p, code in zip(processes, codes, strict=True) if code is None])


def _failures(processes: list[BaseProcess], folder: Path) -> list[_Failure]:
    """Return the ranks that failed by themselves, the first to fail first.

    A rank that was killed or refused the job writes no exception, so it counts as the first: its absence causes those of
    the others.
    """
    found = []
    for rank, process in enumerate(processes):
        status, file = process.exitcode, _error_file(folder, rank)
        if not status:
            continue
        if not file.exists():
            found.append(_Failure(rank, status, 0.0, _how(status), ""))
            continue
        left = json.loads(file.read_text())["message"]
        how = f"failed: {one_line(left['message'])}"
        found.append(_Failure(rank, status, file.stat().st_mtime, how, left["extraInfo"]["py_callstack"]))
    return sorted(found, key=lambda failure: failure.time)


def _how(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL (by the system, if memory ran out)"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status > 128:
        return f"was stopped by {signal.Signals(status - 128).name}"
    return f"ended with exit status {status}"


def _stop(processes: list[BaseProcess], seconds: float) -> None:
    """End them by SIGTERM, or after some seconds by SIGKILL."""
    for process in processes:
        process.terminate()
    _join(processes, seconds)
    for process in processes:
        process.kill()
        process.join()


def _join(processes: list[BaseProcess], seconds: float) -> None:
    """Give them so many seconds, together, to end by themselves."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def run_rank(job: JobConfig) -> int:
    """Train as one rank of `job`, which has been checked; return 0, or the status to exit with.

    With more than one rank, a rank that fails does not return: it ends the process at once.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        with stop_on_signals():
            _train(job, rank)
        return 0
    except UserError as error:
        status = refuse(error, rank)
    except RunError as error:
        refuse(error, rank)
        status = SAID if world_size > 1 else 1
    except Stopped as stopped:
        status = stopped.exit_status
        if rank == 0:
            print(f"stopped by {stopped}; finished checkpoints are complete", file=sys.stderr)
    except Exception as error:  # noqa: BLE001
        # Any error: the other ranks wait for this one, so it must end at once and report why.
        status = fail(error, rank)
    if world_size > 1:
        exit_now(status)
    return status


def _train(job: JobConfig, rank: int) -> None:
    init_logging(rank)
    device_type = prepare_device()
    # From here on the model libraries and torchtitan are imported, which needs both of the above.
    from titanplans.modeling import kernels
    from titanplans.training.checks import import_custom
    from titanplans.training.job import trainer_config
    from titanplans.training.trainer import Trainer

    kernels.install(device_type)
    import_custom(job)  # in a process that was started for this rank, nothing has registered its plans yet
    trainer = Trainer(trainer_config(job))
    try:
        trainer.train()
    except Stopped:
        trainer.close()
        raise
    trainer.close()
