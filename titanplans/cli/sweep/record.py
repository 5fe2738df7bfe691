"""A cell's record on disk, `cell.json` in its folder, and how the cell of the sweep file differs from it.

A record is written before the cell starts, with state "running", and after it has ended. A sweep that is killed in
between leaves the first.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from titanplans.cli.sweep.cells import Cell, values_of
from titanplans.cli.sweep.figures import Figures
from titanplans.config import ConfigError
from titanplans.config.schema import keys
from titanplans.config.values import show
from titanplans.errors import UserError

State = Literal["running", "finished", "refused", "failed", "timed out", "stopped"]
"""finished: exit status 0. refused: 2, or the job contradicts itself. timed out: stopped at the time limit. stopped:
by a signal to the sweep. running: on disk, without a process, the sweep was killed. failed: everything else."""

FILE_NAME = "cell.json"


@dataclass(kw_only=True)
class Record:
    """A cell's settings and its result; the fields are those of cell.json."""

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

    figures: Figures = field(default_factory=dict)
    """Of finished cells only."""

    timing_skip_steps: int | None = None
    """With which the figures were read."""


def new_record(cell: Cell) -> Record:
    """Return the record of a cell that is about to run."""
    job = None if cell.job is None else values_of(cell.job)
    return Record(
        cell=cell.name,
        command=cell.command,
        settings=json.loads(json.dumps(cell.settings)),
        job=job,
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
    """Return how the cell of the file differs from the one that was run: "training.steps = 10, now 12"."""
    now = new_record(cell)
    if record.job is None or now.job is None:
        same = record.job == now.job and record.settings == now.settings
        return [] if same else ["its settings contradicted each other, or do now"]
    told = []
    for key in sorted(now.job.keys() | record.job.keys()):
        # A key that another release did not have counts as its default.
        default = keys()[key].default if key in keys() else None
        before, after = record.job.get(key, default), now.job.get(key, default)
        if before != after:
            told.append(f"{key} = {show_or_unset(before)}, now {show_or_unset(after)}")
    both = now.inputs.keys() & record.inputs.keys()
    return told + [
        f"the file of {key} has other content" for key in both if now.inputs[key] != record.inputs[key]
    ]


def _ranks(cell: Cell) -> int | None:
    if cell.job is None:
        return None
    from titanplans.training.launch import local_ranks  # torch's count of GPUs

    try:
        return local_ranks(cell.job)
    except UserError:  # which the run will say
        return None


def _inputs(cell: Cell) -> dict[str, str]:
    path = None if cell.job is None else cell.job.model.config
    if path is None or not Path(path).is_file():
        return {}
    return {"model.config": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def show_or_unset(value: Any) -> str:
    """Return a job's value as TOML has it, or "unset"."""
    return "unset" if value is None else show(value)
