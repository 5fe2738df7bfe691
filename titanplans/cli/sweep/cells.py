"""From a sweep file to its cells: names, settings, and the command line and the job of each.

A cell whose settings contradict each other is a cell all the same: that it is refused is its result. What depends on
the machine, the data and the model is refused by `train.py`, or asked of it beforehand by `refusal`.
"""

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanplans.cli.sweep.spec import Axis, Spec
from titanplans.config import ConfigError, JobConfig, load_job
from titanplans.config.schema import keys
from titanplans.config.toml import toml_value
from titanplans.config.values import show
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

    settings: dict[str, Any]
    """What differs from the base job, by dotted key: [set], then the cell's own."""

    arguments: list[str]
    """What `train.py` is given."""

    job: JobConfig | None
    """The whole job, or None where it contradicts itself."""

    refusal: str | None
    """Why there is no job."""

    @property
    def command(self) -> str:
        """What a shell would be given to run this cell alone."""
        return shlex.join(["python", "train.py", *self.arguments])


def make_cells(spec: Spec) -> list[Cell]:
    """Return the cells: the product of the grid, the last key varying fastest, then those with a name.

    Raises:
        ConfigError: two cells of equal settings or of one name, a name that is no file's, or a job without a seed.
    """
    cells = [
        _cell(spec, name, spec.fixed | own)
        for name, own in itertools.chain(_product(spec.axes), spec.named.items())
    ]
    _check_names(spec, cells)
    _check_different(spec, cells)
    for cell in cells:
        if cell.job is not None and cell.job.debug.seed is None:
            raise ConfigError(
                f"{spec.path}: debug.seed is unset in cell {cell.name}, so that each run would draw its own, and "
                "losses would differ by that alone; give it in [set], or in the base job"
            )
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
    found = {}
    for name, key in keys().items():
        node: Any = job
        for part in key.section.split("."):
            node = getattr(node, part)
        found[name] = getattr(node, key.name)
    return found


def _product(axes: list[Axis]) -> Iterator[tuple[str, dict[str, Any]]]:
    if not axes:
        return
    for points in itertools.product(*map(_points, axes)):
        settings = {key: value for _, point in points for key, value in point.items()}
        yield ",".join(name for name, _ in points), settings


def _points(axis: Axis) -> list[tuple[str, dict[str, Any]]]:
    """Return the points of an axis with their names."""
    points = [dict(zip(axis.lists, values, strict=True)) for values in zip(*axis.lists.values(), strict=True)]
    words = (
        ",".join(f"{_short(key)}={_word_of_name(value)}" for key, value in point.items()) for point in points
    )
    return list(zip(axis.names or words, points, strict=True))


def _short(dotted: str) -> str:
    """Return a key without its section, where no other section has one of that name."""
    last = dotted.rpartition(".")[2]
    return last if [key.name for key in keys().values()].count(last) == 1 else dotted


def _word_of_name(value: Any) -> str:
    text = "none" if value is None else show(value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")


def _cell(spec: Spec, name: str, settings: dict[str, Any]) -> Cell:
    folder = spec.folder / name
    # The base job has been read, so what is refused now are the settings.
    arguments = [spec.header.base, f"--job.dump_folder={folder}", "--metrics.enable_jsonl=true"]
    arguments += [f"--{key}={_word(value)}" for key, value in settings.items()]
    try:
        job, why = load_job(arguments), None
    except ConfigError as error:
        job, why = None, str(error)
    if job is not None:
        reached = values_of(job)
        assert all(reached[key] == value for key, value in settings.items() if key in reached), arguments
    return Cell(name=name, folder=folder, settings=settings, arguments=arguments, job=job, refusal=why)


def _word(value: Any) -> str:
    """Write a value as the command line reads it, which knows the key's type."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else toml_value(value)


def _check_names(spec: Spec, cells: list[Cell]) -> None:
    seen: set[str] = set()
    for cell in cells:
        if not _NAME.fullmatch(cell.name) or len(cell.name) > _LONGEST_NAME:
            raise ConfigError(
                f'{spec.path}: cell "{cell.name}": a name is its folder\'s, so it is letters, digits and ._=,+- '
                f"(not first), {_LONGEST_NAME} at most; give it a name: [[axis]] names, or [[cells]] name"
            )
        if cell.name in seen:
            raise ConfigError(
                f'{spec.path}: two cells are named "{cell.name}"; give one another name: [[axis]] names, or [[cells]] name'
            )
        seen.add(cell.name)


def _check_different(spec: Spec, cells: list[Cell]) -> None:
    seen: dict[str, str] = {}
    for cell in cells:
        if cell.job is None:
            what = str(sorted(cell.settings.items()))
        else:
            what = replace(cell.job, job=replace(cell.job.job, dump_folder="")).to_toml()
        if what in seen:
            raise ConfigError(
                f"{spec.path}: cells {seen[what]} and {cell.name} have equal settings, so they are one experiment; "
                "leave one out"
            )
        seen[what] = cell.name
