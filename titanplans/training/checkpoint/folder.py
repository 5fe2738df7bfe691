"""The folder of a job's checkpoints: which of its subfolders are checkpoints, and how they are added and removed.

    step-N              a complete checkpoint, with a manifest (titanplans/training/checkpoint/manifest.py)
    .step-N.writing     a checkpoint that is being written; it is renamed when it is complete
    .step-N.replaced    an older checkpoint of the same step, until the new one has its name
    .step-N.removed     a checkpoint that is being removed

Renames are atomic, so a checkpoint is in one of these states even if the process is killed. Other files are neither read nor
removed. Imports no torch.
"""

import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from titanplans.config import JobConfig
from titanplans.disk import sync
from titanplans.errors import ConfigError
from titanplans.training.checkpoint.manifest import MANIFEST, damage, read_manifest

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_INCOMPLETE = re.compile(r"\.(step-(?:0|[1-9][0-9]*))\.(writing|replaced|removed)")


def checkpoint_folder(job: JobConfig) -> Path:
    """Return the folder of the job's checkpoints."""
    return Path(job.job.dump_folder) / job.checkpoint.folder


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`, whether or not it exists."""
    return folder / f"step-{step}"


def writing_path(checkpoint: Path) -> Path:
    """Return the path of `checkpoint` while it is being written."""
    return checkpoint.with_name(f".{checkpoint.name}.writing")


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, the newest last.

    Raises:
        ConfigError: an entry is named step-N but has no manifest, so it may be another program's, or incomplete.
    """
    candidates = ((path, match) for path in _entries(folder) if (match := _STEP.fullmatch(path.name)))
    return sorted(int(match.group(1)) for path, match in candidates if _is_checkpoint(path))


def describe_newest(folder: Path) -> str:
    """Return a phrase that names the newest checkpoint in `folder`."""
    saved = steps(folder)
    if not saved:
        return "there is no checkpoint yet"
    return f"the newest complete checkpoint is {checkpoint_path(folder, saved[-1]).name}"


def remedy(damaged: Path, damage: Callable[[Path], str | None] = damage) -> str:
    """Return a phrase that says how a job can resume although a checkpoint in its folder is damaged.

    Args:
        damaged: the damaged checkpoint.
        damage: returns what is wrong with a checkpoint, or None. It is called for the other checkpoints, newest first,
            until one is intact and has the training state.
    """
    to_remove = []
    for step in reversed(steps(damaged.parent)):
        checkpoint = checkpoint_path(damaged.parent, step)
        if checkpoint == damaged or damage(checkpoint) is not None:
            to_remove.append(checkpoint.name)
        elif step == 0 or read_manifest(checkpoint).holds == "training":
            return (
                f"remove {' and '.join(to_remove)}, and the same command resumes from {checkpoint.name}, the newest intact "
                "checkpoint"
            )
    return "no other checkpoint is intact and has the training state; move the folder away"


def commit(checkpoint: Path) -> None:
    """Rename `writing_path(checkpoint)`, which is complete, to `checkpoint`; remove an older checkpoint of that name."""
    replaced = checkpoint.with_name(f".{checkpoint.name}.replaced")
    if _is_checkpoint(checkpoint):
        checkpoint.rename(replaced)
    writing_path(checkpoint).rename(checkpoint)
    sync(checkpoint.parent)
    if replaced.exists():
        _erase(replaced)


def remove(checkpoint: Path) -> Path:
    """Rename a checkpoint so that it no longer counts as one. Return the new path; its files can be removed later."""
    removed = checkpoint.with_name(f".{checkpoint.name}.removed")
    if removed.exists():
        _erase(removed)
    return checkpoint.rename(removed)


def tidy(folder: Path, states: Collection[str] = ("writing", "replaced", "removed")) -> None:
    """Remove the files that a killed process has left in `folder`. No other process may be writing to `folder`.

    Args:
        folder: the folder of the checkpoints.
        states: suffixes of the names to remove (see the module's docstring); pass ["writing"] after a failed save.
    """
    for path in list(_entries(folder)):
        name, state = match.groups() if (match := _INCOMPLETE.fullmatch(path.name)) else ("", None)
        if state == "replaced" and not (folder / name).exists():
            path.rename(folder / name)  # the process was killed between the two renames of `commit`
        elif state in states:
            _erase(path)


def _is_checkpoint(checkpoint: Path) -> bool:
    """Return whether the path is a checkpoint; raise a ConfigError if it is anything else, except an empty folder."""
    if (checkpoint / MANIFEST).is_file():
        return True
    # An empty folder does not count: a checkpoint can be renamed over it.
    if not checkpoint.exists() or (checkpoint.is_dir() and not any(checkpoint.iterdir())):
        return False
    raise ConfigError(
        f"checkpoint.folder: {checkpoint} has no {MANIFEST}: another program or an older titanplans wrote it; move it "
        "away; if it is a checkpoint, a job can start from it with checkpoint.initial_load_path"
    )


def _erase(path: Path) -> None:
    """Remove an incomplete checkpoint. For a symbolic link, remove only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from folder.iterdir()
