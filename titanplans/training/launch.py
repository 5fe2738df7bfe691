"""Start the ranks of a job on this machine: what `python train.py` does where torchrun did not.

One process a rank, each with the environment that torchrun would give it. When one fails the others
are stopped, and one line says which one it was. Several machines are torchrun's business; what a rank
does is `titanplans.training.rank`'s.
"""

import os
import signal
import sys
import time

import torch
from torch import multiprocessing
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException

from titanplans.config import JobConfig
from titanplans.errors import UserError
from titanplans.training.device import pick_device_type
from titanplans.training.rank import run_rank
from titanplans.training.signals import Stopped

# How long the other ranks may take to end by themselves, and then again after SIGTERM; then SIGKILL.
_GRACE_SECONDS = 2.0
_FAILED = "failed, see its traceback above"


def local_ranks(job: JobConfig) -> int:
    """How many processes to start here: the product of the degrees.

    `data_parallel_shard_degree = -1` takes the GPUs that the other degrees leave; on a CPU, where a
    rank is just a share of the cores, it counts as 1, and under DDP everywhere.

    Raises:
        UserError: the degrees need more GPUs than this machine has.
    """
    degrees, shards = job.parallelism, job.parallelism.shard_degree
    ranks = degrees.data_parallel_replicate_degree * degrees.tensor_parallel_degree
    ranks *= degrees.context_parallel_degree * degrees.pipeline_parallel_degree
    if pick_device_type() == "cpu":
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
    context = multiprocessing.start_processes(
        _run, args=(job, ranks, store.port), nprocs=ranks, join=False, start_method="spawn"
    )
    assert context is not None
    try:
        while not context.join(grace_period=_GRACE_SECONDS):
            pass
    except Stopped:
        _stop(context)
        raise
    except ProcessExitedException as failure:
        if failure.exit_code == 2:  # a UserError, which the rank has told
            return 2
        how, rank, pid = _how(failure), failure.error_index, failure.error_pid
    except ProcessRaisedException as failure:
        print(failure, file=sys.stderr)
        how, rank, pid = _FAILED, failure.error_index, failure.error_pid
    else:
        return 0
    line = f"error: rank {rank} (pid {pid}) {how}; the other ranks were stopped"
    if job.checkpoint.enable:
        line += ". Finished checkpoints are complete: the same command resumes from the newest"
    print(line, file=sys.stderr)
    return 1


def _run(local_rank: int, job: JobConfig, ranks: int, port: int) -> None:
    """The environment is torchrun's: https://docs.pytorch.org/docs/stable/elastic/run.html."""
    os.environ.update(
        RANK=str(local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    sys.exit(run_rank(job))


def _how(failure: ProcessExitedException) -> str:
    if failure.exit_code == -signal.SIGKILL:
        return "was killed by SIGKILL (by the system, if memory ran out)"
    if failure.exit_code < 0:
        return f"was killed by {failure.signal_name}"
    if failure.exit_code > 128:
        return f"was stopped by {signal.Signals(failure.exit_code - 128).name}"
    return _FAILED


def _stop(context: ProcessContext) -> None:
    for process in context.processes:
        process.terminate()
    deadline = time.monotonic() + 3 * _GRACE_SECONDS
    for process in context.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
