"""What is known of a cell on disk, `cell.json` in its folder, and whether that is still the cell of the file.

A record is written before a cell starts and after it has ended, each time whole, so that a sweep that is killed
leaves a record that says so.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from titanplans.cli.sweep.cells import Cell, values_of
from titanplans.config import ConfigError
from titanplans.config.schema import keys
from titanplans.config.values import show
from titanplans.errors import UserError
from titanplans.training.launch import local_ranks

State = Literal["running", "finished", "refused", "failed", "timed out", "stopped"]
"""finished: exit status 0. refused: 2, or the job contradicts itself. timed out: stopped at the time limit. stopped:
by a signal to the sweep. running: on disk, without a process, the sweep was killed. failed: everything else."""

FILE_NAME = "cell.json"


@dataclass(kw_only=True)
class Record:
    """What a cell was, and what came of it; the fields are those of cell.json."""

    cell: str
    command: str
    settings: dict[str, Any]
    job: dict[str, Any] | None
    """Every key with its value, `values_of` the job; None where it contradicts itself."""

    ranks: int | None
    """Processes of the job on this machine; None where it contradicts itself, or they are too many."""

    inputs: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the files that the job names for its model, by key."""

    state: State = "running"
    exit_status: int | None = None
    line: str | None = None
    """Why it did not finish, in a line."""

    seconds: float | None = None
    """From the start of the process to its end."""

    figures: dict[str, float | int | None] = field(default_factory=dict)
    """See `titanplans.cli.sweep.figures`; of finished cells only."""

    timing_skip_steps: int | None = None
    """With which the figures were read."""

    missing: dict[str, str] = field(default_factory=dict)
    """Why a figure is not there, by its name."""


def new_record(cell: Cell) -> Record:
    """Return the record of a cell that is about to run."""
    return Record(
        cell=cell.name,
        command=cell.command,
        settings=cell.settings,
        job=None if cell.job is None else values_of(cell.job),
        ranks=_ranks(cell),
        inputs=_inputs(cell),
    )


def write_record(cell: Cell, record: Record) -> None:
    """Write the cell's record, whole or not at all."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    temporary = cell.folder / f"{FILE_NAME}.tmp"
    temporary.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    temporary.replace(cell.folder / FILE_NAME)


def read_record(cell: Cell) -> Record | None:
    """Return the cell's record, or None where it has never been started.

    Raises:
        ConfigError: the folder is there and is no cell's, or the record is not one of this release's.
    """
    path = cell.folder / FILE_NAME
    if not path.is_file():
        if cell.folder.is_dir() and any(cell.folder.iterdir()):
            raise ConfigError(
                f"{cell.folder} holds files, but no {FILE_NAME}, so it is not a sweep's; move it away, or give "
                "[sweep] another dump_folder"
            )
        return None
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, TypeError) as error:
        raise ConfigError(
            f"{path} can't be read ({error}); remove the folder to run the cell again"
        ) from None


def changes(cell: Cell, record: Record) -> list[str]:
    """Say in what the cell of the file differs from the one that was run: "training.steps = 10, now 12"."""
    if record.job is None or cell.job is None:
        if record.job is None and cell.job is None and record.settings == cell.settings:
            return []
        return ["its settings contradicted each other, or do now"]
    now, told = values_of(cell.job), []
    for key in sorted(now.keys() | record.job.keys()):
        # A key that only one of the releases has stands for its default.
        default = keys()[key].default if key in keys() else None
        before, after = record.job.get(key, default), now.get(key, default)
        if before != after:
            told.append(f"{key} = {_shown(before)}, now {_shown(after)}")
    told += [f"the file of {key} has other content" for key in _changed_inputs(record.inputs, _inputs(cell))]
    return told


def _ranks(cell: Cell) -> int | None:
    if cell.job is None:
        return None
    try:
        return local_ranks(cell.job)
    except UserError:  # which train.py will say
        return None


def _shown(value: Any) -> str:
    return "unset" if value is None else show(value)


def _changed_inputs(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [key for key in after if key in before and after[key] != before[key]]


def _inputs(cell: Cell) -> dict[str, str]:
    path = None if cell.job is None else cell.job.model.config
    if path is None or not Path(path).is_file():
        return {}
    return {"model.config": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
