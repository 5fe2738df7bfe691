"""`main`: read a job from the command line, check it, run it, and return an exit status.

    0          the job has trained, or printed what the command asked for, or saved and ended at SIGTERM
               (checkpoint.save_on_signal)
    1          a rank failed, and the others were stopped: its traceback is printed; or the loss is not finite, or the disk
               is full: one line is printed
    2          the job can't be run as written: one line is printed
    128 + N    the job was stopped by signal N

Under torchrun this process is one rank of the job. Otherwise it starts as many ranks as the degrees need; a job of one rank
runs in this process.
"""

import logging
import os
from contextlib import nullcontext

from titanplans.config import ConfigError, JobConfig, load_job
from titanplans.config.arguments import take_max_restarts
from titanplans.disk import raise_not_saved
from titanplans.errors import RunError, UserError
from titanplans.torchrun import Ranks, read_ranks, restarted
from titanplans.training.checkpoint.folder import checkpoint_folder, describe_newest, remedy
from titanplans.training.launch.exit_status import refuse
from titanplans.training.launch.logs import init_logging
from titanplans.training.launch.orphans import end_with_parent
from titanplans.training.launch.signals import stop_on_signals

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
_ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def main(argv: list[str], command: str = "train") -> int:
    """Run `command`, "train" or "evaluate", for the job that `argv` describes; return the exit status.

    `argv` is the argument of `titanplans.config.load_job`.
    """
    rank = 0
    try:
        with stop_on_signals():
            # MASTER_ADDR and MASTER_PORT do not count, since cluster scripts export them even without torchrun.
            torchrun_variables = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & os.environ.keys()
            torchrun = read_ranks(os.environ) if torchrun_variables else None
            rank = torchrun.rank if torchrun else 0
            if torchrun and "TORCHELASTIC_RUN_ID" in os.environ:
                # The parent is torchrun's agent. Under another launcher, the parent may exit by design.
                end_with_parent(os.getppid())
            restarts, argv = take_max_restarts(argv)
            job = load_job(argv, command)
            if command == "evaluate" and restarts:
                raise ConfigError(f"--max-restarts {restarts}: an evaluation is not restarted; leave it out")
            if torchrun and restarts:
                raise ConfigError(
                    f"--max-restarts {restarts}: torchrun has started this rank, and restarts it: torchrun "
                    f"--max-restarts {restarts}"
                )
            init_logging(rank)
            with raise_not_saved(lambda: describe_newest(checkpoint_folder(job))):
                for note in job.notes:
                    logging.getLogger(__name__).info(note)  # shown on rank 0 only
                return _evaluate(job, torchrun) if command == "evaluate" else _run(job, torchrun, restarts)
    except (UserError, RunError) as error:
        return refuse(error, rank)


def _run(job: JobConfig, torchrun: Ranks | None, restarts: int) -> int:
    """Check the job and train, as the launcher of its ranks or as one of them; return the exit status."""
    # Imported here, so that a mistake in the TOML is refused before torch and the model libraries are imported.
    from titanplans import kernels
    from titanplans.training.checkpoint.manifest import damage
    from titanplans.training.checkpoint.resume import decide_resume
    from titanplans.training.job.checks import check_job
    from titanplans.training.job.outputs import locked
    from titanplans.training.job.repositories import with_commits
    from titanplans.training.launch.launcher import launch
    from titanplans.training.launch.rank import run_rank
    from titanplans.training.trainer.device import prepare_device

    kernels.install(prepare_device())
    rank = torchrun.rank if torchrun else 0
    ranks = _ranks(job, torchrun)
    job = with_commits(job, resumes=job.checkpoint.enable)
    check_job(job, ranks)
    # This process outlives every rank, so it holds the lock. Without the lock, a finished job could not be told from a job
    # that still trains in the folder.
    with locked(job) if rank == 0 else nullcontext():
        resume = decide_resume(job, checkpoint_folder(job), restarted=restarted(os.environ))
        if resume.is_finished and (last := resume.source) is not None:
            if rank == 0:
                if (fault := damage(last)) is not None:
                    raise ConfigError(f"checkpoint.folder: the job is finished, but {fault}; {remedy(last)}")
                print(
                    f"{last} is complete: the job has taken its training.steps = {job.training.steps} and is finished"
                )
            return 0
        if not torchrun and (ranks > 1 or restarts):
            return launch(job, ranks, restarts)
        if not torchrun:
            os.environ.update(_ALONE)
        return run_rank(job)


def _evaluate(job: JobConfig, torchrun: Ranks | None) -> int:
    """Compute a checkpoint's validation loss, after checks, as the launcher of the ranks or as one of them."""
    from titanplans import kernels
    from titanplans.training.job.evaluation import check_evaluation, make_evaluation_job
    from titanplans.training.job.repositories import with_commits
    from titanplans.training.launch.launcher import launch
    from titanplans.training.launch.rank import run_rank
    from titanplans.training.trainer.device import prepare_device

    kernels.install(prepare_device())
    job, checkpoint = make_evaluation_job(with_commits(job, resumes=True))
    ranks = _ranks(job, torchrun)
    check_evaluation(job, checkpoint, ranks)
    if not torchrun and ranks > 1:
        return launch(job, ranks, evaluated_checkpoint=checkpoint)
    if not torchrun:
        os.environ.update(_ALONE)
    return run_rank(job, checkpoint)


def _ranks(job: JobConfig, torchrun: Ranks | None) -> int:
    """Return the number of the job's ranks: torchrun's, or as many as the degrees need on this machine."""
    import torch

    from titanplans.training.launch.launcher import local_ranks

    ranks = torchrun.world_size if torchrun else local_ranks(job)
    if not torchrun and ranks > 1:
        # Ranks may be forked, and a forked process has none of the threads in its parent's thread pool.
        torch.set_num_threads(1)
    return ranks
