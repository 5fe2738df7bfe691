"""`run_rank`: train a job, or evaluate a checkpoint, as one rank.

Our launcher or torchrun has started this rank, or it is the only process of the job.
"""

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
from titanplans.parallel.mesh.process_group import local_device
from titanplans.text import columns
from titanplans.training.checkpoint.folder import checkpoint_folder, describe_newest
from titanplans.training.launch.exit_status import REPORTS, exit_now, fail, refuse
from titanplans.training.launch.logs import init_logging
from titanplans.training.launch.signals import Stopped, stop_on_signals
from titanplans.training.trainer.device import prepare_device

if TYPE_CHECKING:
    from titanplans.training.trainer.trainer import Trainer


def run_rank(job: JobConfig, evaluated_checkpoint: Path | None = None) -> int:
    """Run one rank of a checked job and return its exit status.

    With more than one rank, the function does not return after a failure: it ends the process at once. With
    checkpoint.save_on_signal, the first SIGTERM to any rank makes all ranks save and end.

    Args:
        job: the job, which has been checked.
        evaluated_checkpoint: a checkpoint to validate; None: train.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stop_requested = threading.Event()
    ended_by: BaseException | None = None
    try:
        with stop_on_signals(first_sigterm=stop_requested.set if job.checkpoint.save_on_signal else None):
            if evaluated_checkpoint is None:
                _train(job, rank, stop_requested)
            else:
                _evaluate(job, rank, evaluated_checkpoint)
        return 0
    except (UserError, RunError) as error:
        ended_by, status = error, refuse(error, rank)
    except Stopped as stopped:
        ended_by, status = stopped, stopped.exit_status
        if rank == 0 and REPORTS not in os.environ:  # else our launcher prints it
            print(f"stopped by {stopped}; saved checkpoints are intact", file=sys.stderr)
    except Exception as error:  # noqa: BLE001
        # The other ranks may wait for this one, so after any error it must end at once and report why.
        ended_by, status = error, fail(error, rank)
    if world_size > 1:
        exit_now(status)
    # The exception's frames hold the trainer, whose destruction waits for the loader's workers. Let this happen before the
    # function returns.
    del ended_by
    return status


def _train(job: JobConfig, rank: int, stop_requested: threading.Event) -> None:
    _prepare(job, rank)
    from titanplans.training.trainer.estimate import estimating
    from titanplans.training.trainer.step import GracefulStop

    with estimating(job, local_device()) as estimate:
        trainer = _trainer(job)
        trainer.estimate = estimate
        if job.checkpoint.save_on_signal:
            trainer.graceful_stop = GracefulStop(stop_requested.is_set)
        # The libraries have half a million objects. Freezing them exempts them from the garbage collection before each save.
        gc.freeze()
        with disk.raise_not_saved(trainer.resume_point):
            try:
                trainer.train()
            except Stopped:
                trainer.close()
                raise
            trainer.close()


def _evaluate(job: JobConfig, rank: int, checkpoint: Path) -> None:
    _prepare(job, rank)
    trainer = _trainer(job)
    losses = trainer.evaluate(checkpoint)
    if rank == 0:
        rows = [(name, f"{loss:.5f}", f"{math.exp(loss):,.2f}") for name, loss in losses.items()]
        table = columns([("source", "loss", "perplexity"), *rows], right=(1, 2))
        print("\n".join([str(checkpoint), *table]), flush=True)
    trainer.close()


def _prepare(job: JobConfig, rank: int) -> None:
    """Set up logging, the device, its kernels and the user's modules in this process."""
    init_logging(rank)
    device_type = prepare_device()
    # Imported after logging is set up, since the libraries log on import.
    from titanplans import kernels
    from titanplans.training.job.checks import import_custom

    kernels.install(device_type)
    import_custom(job)  # a spawned rank has not yet imported the user's modules, which register plans


def _trainer(job: JobConfig) -> "Trainer":
    from titanplans.training.trainer.trainer import Trainer

    with disk.raise_not_saved(lambda: describe_newest(checkpoint_folder(job))):
        return Trainer(job)
