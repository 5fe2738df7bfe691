"""The folder of a job's checkpoints: which folders in it are checkpoints, and how they come and go.

    step-N              a whole checkpoint, which has a card (titanplans/training/checkpoint/card.py)
    .step-N.writing     one that is being written; it is renamed when it is whole
    .step-N.replaced    one of the same step, while a newer one takes its name
    .step-N.removed     one that is being removed

A rename is done or not done, whenever the process is killed. What else lies here belongs to others: it is neither read
nor removed. Needs no torch.
"""

import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from titanplans.config import JobConfig
from titanplans.disk import sync
from titanplans.errors import ConfigError
from titanplans.training.checkpoint.card import CARD, damage, read_card

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_HALF = re.compile(r"\.(step-(?:0|[1-9][0-9]*))\.(writing|replaced|removed)")


def own_folder(job: JobConfig) -> Path:
    """Return the folder of the job's checkpoints."""
    return Path(job.job.dump_folder) / job.checkpoint.folder


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is, or will be."""
    return folder / f"step-{step}"


def writing_path(checkpoint: Path) -> Path:
    """Return where `checkpoint` is while it is written."""
    return checkpoint.with_name(f".{checkpoint.name}.writing")


def steps(folder: Path) -> list[int]:
    """Return the steps of the whole checkpoints in `folder`, the newest last.

    Raises:
        ConfigError: something else has the name of one, so who wrote it, and how whole it is, can't be said.
    """
    named = ((path, match) for path in _entries(folder) if (match := _STEP.fullmatch(path.name)))
    return sorted(int(match.group(1)) for path, match in named if _is_ours(path))


def newest(folder: Path) -> str:
    """Return in words which checkpoint in `folder` is the newest."""
    present = steps(folder)
    if not present:
        return "there is no checkpoint yet"
    return f"the newest complete checkpoint is {checkpoint_path(folder, present[-1]).name}"


def remedy(damaged: Path, damage: Callable[[Path], str | None] = damage) -> str:
    """Return in words how a job whose checkpoint is damaged can go on. `damage` is asked of the others."""
    to_remove = []
    for step in reversed(steps(damaged.parent)):
        checkpoint = checkpoint_path(damaged.parent, step)
        if checkpoint == damaged or damage(checkpoint) is not None:
            to_remove.append(checkpoint.name)
        elif step == 0 or read_card(checkpoint).holds == "training":
            return (
                f"remove {' and '.join(to_remove)}, and the same command resumes from {checkpoint.name}, the newest intact "
                "one"
            )
    return "no other is intact; move the folder away"


def commit(checkpoint: Path) -> None:
    """Rename `writing_path(checkpoint)`, which is complete, to the checkpoint; an older one of that name is removed."""
    replaced = checkpoint.with_name(f".{checkpoint.name}.replaced")
    if _is_ours(checkpoint):
        checkpoint.rename(replaced)
    writing_path(checkpoint).rename(checkpoint)
    sync(checkpoint.parent)
    if replaced.exists():
        _erase(replaced)


def remove(checkpoint: Path) -> Path:
    """Rename a checkpoint, so that its files can be removed later; return the new path."""
    removed = checkpoint.with_name(f".{checkpoint.name}.removed")
    if removed.exists():
        _erase(removed)
    return checkpoint.rename(removed)


def tidy(folder: Path, states: Collection[str] = ("writing", "replaced", "removed")) -> None:
    """Remove the partial files of a killed process, or of a failed save, which has `states` = ["writing"].

    No other process may be writing to `folder`.
    """
    for path in list(_entries(folder)):
        name, state = match.groups() if (match := _HALF.fullmatch(path.name)) else ("", None)
        if state == "replaced" and not (folder / name).exists():
            path.rename(folder / name)  # killed between two renames
        elif state in states:
            _erase(path)


def _is_ours(checkpoint: Path) -> bool:
    """Whether there is a checkpoint; an empty folder, over which one can be renamed, is none."""
    if (checkpoint / CARD).is_file():
        return True
    if not checkpoint.exists() or (checkpoint.is_dir() and not any(checkpoint.iterdir())):
        return False
    raise ConfigError(
        f"checkpoint.folder: {checkpoint} has no {CARD}: another program or an older titanplans wrote it; move it "
        "away, and if it is a checkpoint, start from it by checkpoint.initial_load_path"
    )


def _erase(path: Path) -> None:
    """Remove a partial checkpoint; if it is a link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from folder.iterdir()
