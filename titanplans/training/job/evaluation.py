"""The job that validates a checkpoint of another one, which it changes nothing of."""

import os
from pathlib import Path

from titanplans import modeling
from titanplans.config import ConfigError, JobConfig
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.match import check_saved
from titanplans.training.checkpoint.resume import no_such_step
from titanplans.training.job import resolve
from titanplans.training.job.checks import check_job, check_published


def evaluation_of(job: JobConfig) -> tuple[JobConfig, Path]:
    """Return the job that validates a checkpoint of `job`, and that checkpoint.

    It is the one of checkpoint.load_step in the job's own folder, by default the newest, whether or not training goes on
    from it; of a job that has saved none, checkpoint.initial_load_path.

    Raises:
        ConfigError: there is none.
    """
    given, own = job.checkpoint, folder.own_folder(job)
    present = folder.steps(own)
    if given.load_step != -1 and given.load_step not in present:
        raise no_such_step(own, given.load_step)
    initial = resolve.published_folder(job) or given.initial_load_path
    if not present and initial is None:
        raise ConfigError(
            f"evaluate: {own} holds no checkpoint; name the job's job.dump_folder, or a checkpoint by "
            "checkpoint.initial_load_path"
        )
    step = present[-1] if given.load_step == -1 and present else given.load_step
    checkpoint = folder.checkpoint_path(own, step) if present else Path(str(initial))
    no_saves = ("create_seed_checkpoint", "enable_first_step_checkpoint", "save_on_signal", "last_save_in_hf")
    no_outputs = ("enable_jsonl", "enable_tensorboard", "enable_wandb", "measure_first_step")
    sections = {
        "validation": job.validation.replace(enable=True),
        "checkpoint": given.replace(enable=True, load_only=True, **dict.fromkeys(no_saves, False)),
        "metrics": job.metrics.replace(**dict.fromkeys(no_outputs, False)),
        "profiling": job.profiling.replace(enable_profiling=False, enable_memory_snapshot=False),
    }
    return job.model_copy(update=sections), checkpoint


def check_evaluation(job: JobConfig, checkpoint: Path, world_size: int) -> None:
    """Refuse a job of `evaluation_of` that can't run on `world_size` processes, or a checkpoint of another model.

    Raises:
        UserError: the first reason, with the key, the value and what would work.
    """
    unsaved = job.checkpoint.model_copy(
        update={"enable": False}
    )  # `check_job` asks whether training could go on
    check_job(job.model_copy(update={"checkpoint": unsaved}), world_size)
    model = modeling.build(resolve.hf_config(job))
    overrides = job.model.config_overrides or ()
    own = checkpoint.parent == folder.own_folder(job)
    key = "checkpoint.folder" if own else "checkpoint.initial_load_path"
    if not own and os.path.isfile(checkpoint / "config.json"):
        check_published(str(checkpoint), model, overrides)
    else:
        check_saved(checkpoint, model, key, resumes=False, overrides=overrides)
