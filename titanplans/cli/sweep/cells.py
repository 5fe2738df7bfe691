"""The cells of a sweep: the command line and the job of each.

A cell whose settings contradict each other is still a cell; its result is the refusal. What depends on the machine, the
data and the model is refused when the job runs; `refusal` checks it without running.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from titanplans.cli.sweep.spec import Settings, Spec
from titanplans.config import ConfigError, JobConfig, load_job
from titanplans.config.translate import flatten
from titanplans.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]*")
_LONGEST_NAME = 200  # file systems take 255 bytes


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job of a sweep."""

    name: str
    """Also the name of its folder."""

    folder: Path
    """Its dump_folder."""

    settings: Settings
    """What differs from the base job."""

    arguments: list[str]
    """What `titanplans train` is given."""

    job: JobConfig | None
    """The whole job, or None where it contradicts itself."""

    refusal: str | None
    """Why there is no job."""

    @property
    def command(self) -> str:
        """The command that runs this cell alone."""
        return shlex.join(["titanplans", "train", *self.arguments])


def make_cells(spec: Spec) -> list[Cell]:
    """Return the cells in the order of the file.

    Raises:
        ConfigError: two cells of equal settings, a name that is no file's, or a job without a seed.
    """
    cells, seen = [], {}
    for name, settings in spec.cells.items():
        if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
            raise ConfigError(
                f'{spec.path}: cell "{name}": a name is its folder\'s, so it is letters, digits and ._=,+- '
                f"(not first), {_LONGEST_NAME} at most; give it a name: [[axis]] names, or [[cells]] name"
            )
        cell = _cell(spec, name, settings)
        job = cell.job
        values = settings if job is None else values_of(job) | {"job.dump_folder": ""}
        what = str(sorted(values.items()))
        if what in seen:
            raise ConfigError(
                f"{spec.path}: cells {seen[what]} and {name} have equal settings, so they are one experiment; "
                "leave one out"
            )
        if job is not None and job.debug.seed is None:
            raise ConfigError(
                f"{spec.path}: debug.seed is unset in cell {name}, so that each run would draw its own, and "
                "losses would differ by that alone; give it in [set], or in the base job"
            )
        seen[what] = name
        cells.append(cell)
    return cells


def select(spec: Spec, cells: list[Cell], only: list[str]) -> list[Cell]:
    """Return the cells of these names, or all where none is given.

    Raises:
        ConfigError: there is no cell of that name.
    """
    names = [cell.name for cell in cells]
    for name in only:
        if name not in names:
            raise ConfigError(f"--only {name}: {spec.path} has no such cell; there are {', '.join(names)}")
    return [cell for cell in cells if not only or cell.name in only]


def refusal(cell: Cell) -> str | None:
    """Return why this machine would refuse the cell before it runs, or None. Imports the model libraries."""
    if cell.job is None:
        return cell.refusal
    from titanplans.training.checks import check_job
    from titanplans.training.device import prepare_device
    from titanplans.training.launch import local_ranks

    prepare_device()
    try:
        check_job(cell.job, local_ranks(cell.job))
    except UserError as error:
        return str(error)
    return None


def values_of(job: JobConfig) -> dict[str, Any]:
    """Return every key of a job with its value, as JSON has it."""
    return dict(flatten(job.to_dict(), "", "job"))


def _cell(spec: Spec, name: str, settings: Settings) -> Cell:
    folder = spec.folder / name
    arguments = [spec.header.base, f"--job.dump_folder={folder}", "--metrics.enable_jsonl=true"]
    arguments += [f"--{key}={_word(value)}" for key, value in settings.items()]
    # The base job has been read, so what is refused now are the settings.
    try:
        job, why = load_job(arguments), None
    except ConfigError as error:
        job, why = None, str(error)
    return Cell(name=name, folder=folder, settings=settings, arguments=arguments, job=job, refusal=why)


def _word(value: Any) -> str:
    """Write a value as the command line reads it, which knows the key's type."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return value if isinstance(value, str) else _toml(value)


def _toml(value: Any) -> str:
    return " ".join(tomli_w.dumps({"v": value}).removeprefix("v = ").split())
