"""Where a job begins: the one decision that its checks, its launcher and its loop share."""

from pathlib import Path
from typing import Literal, NamedTuple

from titanplans.config import ConfigError, JobConfig
from titanplans.training.checkpoint import folder as folders
from titanplans.training.checkpoint.card import damage, read_card
from titanplans.training.job import resolve

OWN = "checkpoint.folder"


class Resume(NamedTuple):
    """What a job loads before its first step."""

    source: Path | None = None
    """A step-N folder or a Hugging Face folder; None: nothing is loaded, and the initial weights are drawn."""

    takes: Literal["weights", "training"] = "weights"
    """The weights alone, and training begins at step 1; or all that training goes on from."""

    key: str = ""
    """The option that leads to `source`, for errors; `OWN` for the job's own folder."""

    in_hf: bool = False
    """`source` is a Hugging Face folder."""

    is_finished: bool = False
    """All steps have been taken, `source` is the last of them, and nothing is loaded."""


def decide_resume(job: JobConfig, folder: Path, *, restarted: bool) -> Resume:
    """Decide what `job` loads, by the checkpoints in its own `folder`; nothing is written.

    The first line that fits holds. "Newest" is by step; step 0 is a seed: weights that training starts from.

    | option                  | own folder                                   | the job                                |
    |-------------------------|----------------------------------------------|----------------------------------------|
    | enable = false          |                                              | draws its weights                      |
    | create_seed_checkpoint  | holds a checkpoint                           | is refused                             |
    | create_seed_checkpoint  | is empty                                     | draws its weights                      |
    | load_step = N           | has no step N                                | is refused                             |
    | load_step = N, and a    | has later ones, the newest saved by a job    | goes on as with load_step = -1         |
    | launcher restarted it   | that began at N                              |                                        |
    | load_step = N, and not  | has later ones                               | is refused: it would overwrite them    |
    | load_only               |                                              |                                        |
    | initial_load_path, or   | is empty                                     | loads its weights, or, with            |
    | initial_load_in_hf      |                                              | initial_load_model_only = false, all   |
    |                         | is empty                                     | draws its weights                      |
    | not load_only           | newest >= training.steps                     | is finished                            |
    | load_step = N           | N holds the weights alone, and N > 0         | is refused                             |
    | load_step = N           | N holds all that training goes on from       | resumes from N                         |
    | load_step = 0           | has the seed                                 | loads its weights                      |
    | load_step = -1          | newest holds all                             | resumes from it                        |
    | load_step = -1          | newest holds the weights alone, an earlier   | resumes from the earlier one, and      |
    |                         | one all                                      | repeats the steps after it             |
    | load_step = -1          | none holds all, but there is a seed          | loads its weights                      |
    | load_step = -1          | all hold the weights alone                   | is refused                             |

    Raises:
        ConfigError: for each "is refused", with what would work; or the card of the checkpoint is damaged.
    """
    checkpoint = job.checkpoint
    if not checkpoint.enable:
        return Resume()
    steps = folders.steps(folder)
    if checkpoint.create_seed_checkpoint:
        if steps:
            raise ConfigError(
                f"checkpoint.create_seed_checkpoint: {folder} already holds step-{steps[-1]}, and a seed is the first; name "
                "another folder"
            )
        return Resume()
    load_step = checkpoint.load_step
    if load_step not in (-1, *steps):
        raise no_such_step(folder, load_step)
    if load_step != -1 and load_step != steps[-1]:
        if restarted and _began_at(folders.checkpoint_path(folder, steps[-1]), load_step):
            load_step = -1
        elif not checkpoint.load_only:
            raise _goes_back(folder, load_step, steps[-1])
    if not steps:
        return _initial(job)
    if steps[-1] >= job.training.steps and not checkpoint.load_only:
        return Resume(folders.checkpoint_path(folder, steps[-1]), key=OWN, is_finished=True)
    for step in reversed(steps) if load_step == -1 else [load_step]:
        if (resume := _resume_at(folder, step)) is not None:
            return resume
    raise _weights_alone(folder, load_step, steps[-1])


def no_such_step(folder: Path, load_step: int) -> ConfigError:
    """Return the error of a step that has no checkpoint."""
    return ConfigError(
        f"checkpoint.load_step = {load_step}: there is no {folder}/step-{load_step}; -1 takes the newest"
    )


def _initial(job: JobConfig) -> Resume:
    """Return what a job starts from that has no checkpoint of its own."""
    if (published := resolve.hf_weights_folder(job)) is not None:
        return Resume(Path(published), key=resolve.hf_weights_option(job), in_hf=True)
    if job.checkpoint.initial_load_path is None:
        return Resume()
    takes: Literal["weights", "training"] = (
        "weights" if job.checkpoint.initial_load_model_only else "training"
    )
    return Resume(Path(job.checkpoint.initial_load_path), takes, "checkpoint.initial_load_path")


def _resume_at(folder: Path, step: int) -> Resume | None:
    """Return how a job resumes from a step; None if its checkpoint holds the weights alone."""
    checkpoint = folders.checkpoint_path(folder, step)
    if step == 0:
        return Resume(checkpoint, key=OWN)
    if (wrong := damage(checkpoint, names=())) is not None:
        raise ConfigError(f"{OWN}: {wrong}; {folders.remedy(checkpoint)}")
    return Resume(checkpoint, "training", OWN) if read_card(checkpoint).holds == "training" else None


def _weights_alone(folder: Path, load_step: int, newest: int) -> ConfigError:
    checkpoint = folders.checkpoint_path(folder, newest if load_step == -1 else load_step)
    what = f"{checkpoint} {read_card(checkpoint).weights_alone}"
    start = f'start in a new folder with checkpoint.initial_load_path = "{checkpoint}"'
    if load_step == -1:
        return ConfigError(f"{OWN}: {what}, and so do all others; {start}")
    return ConfigError(
        f"checkpoint.load_step = {load_step}: {what}; leave load_step out to resume from an earlier one, or {start}"
    )


def _began_at(checkpoint: Path, load_step: int) -> bool:
    """Whether a job with this load_step saved `checkpoint`."""
    intact = damage(checkpoint, names=()) is None
    return intact and read_card(checkpoint).job.get("checkpoint.load_step") == load_step


def _goes_back(folder: Path, load_step: int, newest: int) -> ConfigError:
    checkpoint = folders.checkpoint_path(folder, load_step)
    return ConfigError(
        f"checkpoint.load_step = {load_step}: {folder} holds later checkpoints, up to step-{newest}, which the job would "
        "overwrite; go back in a new checkpoint.folder, with checkpoint.initial_load_path = "
        f'"{checkpoint}" and initial_load_model_only = false'
    )
