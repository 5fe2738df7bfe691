"""`titanplans evaluate`: convert a job to one that validates one of its checkpoints and writes nothing."""

import os
from pathlib import Path

from titanplans import modeling
from titanplans.config import ConfigError, JobConfig
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.match import check_saved
from titanplans.training.checkpoint.resume import no_such_step
from titanplans.training.job import repositories, resolve
from titanplans.training.job.checks import check_hf_folder, check_job


def make_evaluation_job(job: JobConfig) -> tuple[JobConfig, Path]:
    """Return a job that validates a checkpoint of `job`, and the path of that checkpoint.

    The checkpoint is step checkpoint.load_step in the job's folder, by default the newest step, even if it holds only
    weights. If the folder holds no checkpoint, the initial weights are validated: checkpoint.initial_load_path or the
    Hugging Face folder.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    options, own_folder = job.checkpoint, folder.checkpoint_folder(job)
    steps = folder.steps(own_folder)
    if options.load_step != -1 and options.load_step not in steps:
        raise no_such_step(own_folder, options.load_step)
    initial = resolve.hf_weights_folder(job) or options.initial_load_path
    if not steps and initial is None:
        raise ConfigError(
            f"evaluate: {own_folder} holds no checkpoint; name the job's job.dump_folder, or a checkpoint in "
            "checkpoint.initial_load_path"
        )
    step = steps[-1] if options.load_step == -1 and steps else options.load_step
    checkpoint = folder.checkpoint_path(own_folder, step) if steps else Path(str(initial))
    no_saves = ("create_seed_checkpoint", "enable_first_step_checkpoint", "save_on_signal", "last_save_in_hf")
    no_outputs = ("enable_jsonl", "enable_tensorboard", "enable_wandb", "measure_first_step")
    sections = {
        "validation": job.validation.replace(enable=True),
        "checkpoint": options.replace(enable=True, load_only=True, **dict.fromkeys(no_saves, False)),
        "metrics": job.metrics.replace(**dict.fromkeys(no_outputs, False)),
        "profiling": job.profiling.replace(enable_profiling=False, enable_memory_snapshot=False),
    }
    return job.model_copy(update=sections), checkpoint


def check_evaluation(job: JobConfig, checkpoint: Path, world_size: int) -> None:
    """Refuse an evaluation job that can't run on `world_size` processes, or a checkpoint of another model.

    Args:
        job, checkpoint: the results of `make_evaluation_job`.
        world_size: number of ranks.

    Raises:
        UserError: names the first fault: the option, its value and what would work.
    """
    # Checkpoints are disabled, since `check_job` would check whether training can resume from one.
    without_checkpoints = job.checkpoint.model_copy(update={"enable": False})
    check_job(job.model_copy(update={"checkpoint": without_checkpoints}), world_size)
    model = modeling.build(resolve.hf_config(job))
    overrides = job.model.config_overrides or ()
    is_own = checkpoint.parent == folder.checkpoint_folder(job)
    key = "checkpoint.folder" if is_own else "checkpoint.initial_load_path"
    if not is_own or job.checkpoint.save_adapters_only:
        repositories.download_weights(job)
    if not is_own and os.path.isfile(checkpoint / "config.json"):
        check_hf_folder(str(checkpoint), model, overrides)
    else:
        check_saved(checkpoint, model, key, resumes=False, overrides=overrides)
