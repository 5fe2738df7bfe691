"""`decide_resume`: what a job loads before its first step. The job's checks, launcher and trainer all call it."""

from pathlib import Path
from typing import Literal, NamedTuple

from titanplans.config import ConfigError, JobConfig
from titanplans.training.checkpoint import folder as folders
from titanplans.training.checkpoint.manifest import damage, read_manifest
from titanplans.training.job import resolve

FOLDER_OPTION = "checkpoint.folder"
"""The option that names the job's own folder of checkpoints."""


class Resume(NamedTuple):
    """What a job loads before its first step."""

    source: Path | None = None
    """A folder step-N or a Hugging Face folder; None: nothing is loaded, and the weights are initialised randomly."""

    contents: Literal["weights", "training"] = "weights"
    """"weights": only the weights are loaded, and training begins at step 1. "training": training continues from the saved
    state."""

    key: str = ""
    """The option that names `source`, for errors; `FOLDER_OPTION` for the job's own folder."""

    in_hf: bool = False
    """Whether `source` is a Hugging Face folder."""

    is_finished: bool = False
    """Whether all steps have been taken: `source` is the last checkpoint, and nothing is loaded."""


def decide_resume(job: JobConfig, folder: Path, *, restarted: bool) -> Resume:
    """Decide what `job` loads, from its options and the checkpoints in its folder; change nothing.

    The first matching row of the table applies. The newest checkpoint is the one with the highest step. Step 0 is a seed:
    weights that training starts from.

    | options                 | the job's folder                             | the job                                |
    |-------------------------|----------------------------------------------|----------------------------------------|
    | enable = false          |                                              | starts from random weights             |
    | create_seed_checkpoint  | has a checkpoint                             | is refused                             |
    | create_seed_checkpoint  | is empty                                     | starts from random weights             |
    | load_step = N           | has no step N                                | is refused                             |
    | load_step = N, and a    | has later steps, the newest saved by a job   | continues as with load_step = -1       |
    | launcher restarted it   | with the same load_step                      |                                        |
    | load_step = N, without  | has later steps                              | is refused: it would overwrite them    |
    | load_only               |                                              |                                        |
    | initial_load_path or    | is empty                                     | loads these weights; with              |
    | initial_load_in_hf      |                                              | initial_load_model_only = false, all   |
    |                         | is empty                                     | starts from random weights             |
    | without load_only       | newest >= training.steps                     | is finished                            |
    | load_step = N           | step N holds weights only, and N > 0         | is refused                             |
    | load_step = N           | step N holds the training state              | resumes from N                         |
    | load_step = 0           | has the seed                                 | loads its weights                      |
    | load_step = -1          | the newest holds the training state          | resumes from it                        |
    | load_step = -1          | the newest holds weights only, an earlier    | resumes from the earlier one, and      |
    |                         | one the training state                       | repeats the steps after it             |
    | load_step = -1          | none holds the training state, but there is  | loads the seed's weights               |
    |                         | a seed                                       |                                        |
    | load_step = -1          | all hold weights only                        | is refused                             |

    Args:
        job: the job.
        folder: the folder of the job's checkpoints.
        restarted: whether a launcher has restarted the job's ranks.

    Raises:
        ConfigError: the job is refused, or the manifest of the checkpoint is damaged. The message says what would work.
    """
    checkpoint = job.checkpoint
    if not checkpoint.enable:
        return Resume()
    steps = folders.steps(folder)
    if checkpoint.create_seed_checkpoint:
        if steps:
            raise ConfigError(
                f"checkpoint.create_seed_checkpoint: {folder} already holds step-{steps[-1]}, but a seed must be the first "
                "checkpoint; name another folder"
            )
        return Resume()
    load_step = checkpoint.load_step
    if load_step not in (-1, *steps):
        raise no_such_step(folder, load_step)
    if load_step != -1 and load_step != steps[-1]:
        # A restarted job must continue from its own later steps, not go back to load_step each time.
        if restarted and _has_load_step(folders.checkpoint_path(folder, steps[-1]), load_step):
            load_step = -1
        elif not checkpoint.load_only:
            raise _overwrite_error(folder, load_step, steps[-1])
    if not steps:
        return _initial(job)
    if steps[-1] >= job.training.steps and not checkpoint.load_only:
        return Resume(folders.checkpoint_path(folder, steps[-1]), key=FOLDER_OPTION, is_finished=True)
    for step in reversed(steps) if load_step == -1 else [load_step]:
        if (resume := _resume_at(folder, step)) is not None:
            return resume
    raise _weights_only_error(folder, load_step, steps[-1])


def no_such_step(folder: Path, load_step: int) -> ConfigError:
    """Return the error for a load_step that has no checkpoint."""
    return ConfigError(
        f"checkpoint.load_step = {load_step}: there is no {folder}/step-{load_step}; -1 takes the newest"
    )


def _initial(job: JobConfig) -> Resume:
    """Return what a job without checkpoints loads."""
    if (hf_folder := resolve.hf_weights_folder(job)) is not None:
        return Resume(Path(hf_folder), key=resolve.hf_weights_option(job), in_hf=True)
    if job.checkpoint.initial_load_path is None:
        return Resume()
    contents: Literal["weights", "training"] = (
        "weights" if job.checkpoint.initial_load_model_only else "training"
    )
    return Resume(Path(job.checkpoint.initial_load_path), contents, "checkpoint.initial_load_path")


def _resume_at(folder: Path, step: int) -> Resume | None:
    """Return how a job continues from a step of its folder; None if it can't, since the checkpoint holds only weights."""
    checkpoint = folders.checkpoint_path(folder, step)
    if step == 0:
        return Resume(checkpoint, key=FOLDER_OPTION)
    # Only the manifest is checked here. The files' checksums, which take longer, are checked when the files are loaded.
    if (fault := damage(checkpoint, names=())) is not None:
        raise ConfigError(f"{FOLDER_OPTION}: {fault}; {folders.remedy(checkpoint)}")
    return (
        Resume(checkpoint, "training", FOLDER_OPTION)
        if read_manifest(checkpoint).holds == "training"
        else None
    )


def _weights_only_error(folder: Path, load_step: int, newest: int) -> ConfigError:
    checkpoint = folders.checkpoint_path(folder, newest if load_step == -1 else load_step)
    reason = f"{checkpoint} {read_manifest(checkpoint).weights_only_reason}"
    remedy = f'start in a new folder with checkpoint.initial_load_path = "{checkpoint}"'
    if load_step == -1:
        return ConfigError(f"{FOLDER_OPTION}: {reason}, and no other checkpoint holds more; {remedy}")
    return ConfigError(
        f"checkpoint.load_step = {load_step}: {reason}; omit load_step to resume from an earlier checkpoint, or {remedy}"
    )


def _has_load_step(checkpoint: Path, load_step: int) -> bool:
    """Return whether the job that saved `checkpoint` had this load_step."""
    is_intact = damage(checkpoint, names=()) is None
    return is_intact and read_manifest(checkpoint).job.get("checkpoint.load_step") == load_step


def _overwrite_error(folder: Path, load_step: int, newest: int) -> ConfigError:
    checkpoint = folders.checkpoint_path(folder, load_step)
    return ConfigError(
        f"checkpoint.load_step = {load_step}: {folder} holds later checkpoints, up to step-{newest}, which the job would "
        "overwrite; go back in a new checkpoint.folder, with checkpoint.initial_load_path = "
        f'"{checkpoint}" and initial_load_model_only = false'
    )
