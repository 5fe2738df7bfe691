"""One rank of a job, from its environment to its exit status.

torchrun, `titanplans.training.launch` or, for a single process, `titanplans.training.main` sets RANK and WORLD_SIZE.
"""

import os
import sys

from titanplans.config import JobConfig
from titanplans.errors import UserError
from titanplans.training.device import prepare_device
from titanplans.training.exit_status import exit_now, fail, refuse
from titanplans.training.logs import init_logging
from titanplans.training.signals import Stopped, stop_on_signals


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
