"""One rank: it trains, or evaluates a checkpoint; started by our launcher, by torchrun, or as the only process."""

import gc
import math
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from titanplans import disk
from titanplans.config import JobConfig
from titanplans.errors import RunError, UserError
from titanplans.text import columns
from titanplans.training.checkpoint.folder import newest, own_folder
from titanplans.training.launch.exit_status import REPORTS, exit_now, fail, refuse
from titanplans.training.launch.logs import init_logging
from titanplans.training.launch.signals import Stopped, stop_on_signals
from titanplans.training.trainer.device import prepare_device

if TYPE_CHECKING:
    from titanplans.training.trainer.trainer import Trainer


def run_rank(job: JobConfig, evaluated: Path | None = None) -> int:
    """Train as one rank of `job`, which has been checked, or validate a checkpoint; return 0, or the status to exit with.

    With more than one rank, a rank that fails does not return: it ends the process at once. Under checkpoint.save_on_signal
    a first SIGTERM to any rank lets all of them save and end.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    asked = threading.Event()
    ended_by: BaseException | None = None
    try:
        with stop_on_signals(first_sigterm=asked.set if job.checkpoint.save_on_signal else None):
            if evaluated is None:
                _train(job, rank, asked)
            else:
                _evaluate(job, rank, evaluated)
        return 0
    except (UserError, RunError) as error:
        ended_by, status = error, refuse(error, rank)
    except Stopped as stopped:
        ended_by, status = stopped, stopped.exit_status
        if rank == 0 and REPORTS not in os.environ:  # our launcher says it
            print(f"stopped by {stopped}; finished checkpoints are complete", file=sys.stderr)
    except Exception as error:  # noqa: BLE001
        # Any error: the other ranks wait for this one, so it must end at once and report why.
        ended_by, status = error, fail(error, rank)
    if world_size > 1:
        exit_now(status)
    del ended_by  # its frames hold the trainer, whose end waits for loader workers; several ranks end without
    return status


def _train(job: JobConfig, rank: int, asked: threading.Event) -> None:
    trainer = _trainer(job, rank)
    from titanplans.training.trainer.step import GracefulStop

    if job.checkpoint.save_on_signal:
        trainer.graceful_stop = GracefulStop(asked.is_set)
    gc.freeze()  # half a million objects of the libraries, which each collection before a save would look through
    with disk.one_line(trainer.resume_point):
        try:
            trainer.train()
        except Stopped:
            trainer.close()
            raise
        trainer.close()


def _evaluate(job: JobConfig, rank: int, checkpoint: Path) -> None:
    trainer = _trainer(job, rank)
    losses = trainer.evaluate(checkpoint)
    if rank == 0:
        rows = [(name, f"{loss:.5f}", f"{math.exp(loss):,.2f}") for name, loss in losses.items()]
        table = columns([("source", "loss", "perplexity"), *rows], right=(1, 2))
        print("\n".join([str(checkpoint), *table]), flush=True)
    trainer.close()


def _trainer(job: JobConfig, rank: int) -> "Trainer":
    init_logging(rank)
    device_type = prepare_device()
    # Only now: the libraries log as they are imported.
    from titanplans import kernels
    from titanplans.training.job.checks import import_custom
    from titanplans.training.trainer.trainer import Trainer

    kernels.install(device_type)
    import_custom(job)  # in a process that was started for this rank, nothing has registered its plans yet
    with disk.one_line(lambda: newest(own_folder(job))):
        return Trainer(job)
