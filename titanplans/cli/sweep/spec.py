"""The sweep file: the base job and the settings of each cell.

Keys are a job's. Each key and value is checked here, before anything runs. Whether a cell's settings contradict each
other is found in `titanplans.cli.sweep.cells`.
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from titanplans.config.lines import KeyInFile
from titanplans.config.options import Options, read_toml
from titanplans.config.other_names import RENAMED
from titanplans.config.schema import keys
from titanplans.config.translate import Given, flatten, refuse_unknown
from titanplans.config.values import FilePath, NaturalInt, PositiveFloat, from_text
from titanplans.errors import ConfigError, OptionError
from titanplans.text import show

OWNED = {
    "job.dump_folder": "each cell has a folder of its own; [sweep] dump_folder says where",
    "metrics.enable_jsonl": "the table is made from these files, so the sweep switches them on",
}
"""Keys that the sweep itself gives to each cell, and why."""

Settings = dict[str, str]
"""Values as words of the command line, by today's dotted key."""


class Header(Options, section="sweep"):
    """[sweep]."""

    base: FilePath = "."
    """The job that is varied: the path of its TOML, from the folder where the command is started. Required."""

    dump_folder: FilePath | None = None
    """Folder for the cells and the tables; None: "outputs/" and the file's name."""

    description: str = ""
    """What the experiment is for; printed above the table."""

    time_limit_seconds: PositiveFloat | None = None
    """After how long a cell is stopped; None: never."""

    timing_skip_steps: NaturalInt = 3
    """Steps at the start of a cell that don't count for tokens/s."""


class SweepFile(Options):
    """The tables of a sweep file; their keys are not yet read."""

    sweep: Header = Header()
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Any] = Field(default_factory=dict)
    axis: tuple[dict[str, Any], ...] = ()
    cells: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Spec:
    """A sweep file that was read."""

    path: str
    header: Header
    cells: dict[str, Settings]
    """What each cell has over the base job, by its name: [set], then its own. The grid's cells come first."""

    @property
    def folder(self) -> Path:
        """Where the cells and the tables are written."""
        return Path(self.header.dump_folder or f"outputs/{Path(self.path).stem}")


def read_spec(path: str) -> Spec:
    """Read a sweep file.

    Raises:
        ConfigError: it can't be read, its base job can't, it has an unknown key, a value of another type, or no cell, or
            two cells have one name.
    """
    try:
        file = SweepFile(**read_toml(Path(path), "sweep file"))
    except OptionError as error:
        raise ConfigError(f"{path}: {error}") from None
    if "base" not in file.sweep.model_fields_set:
        raise ConfigError(
            f'{path}: sweep.base is missing: the job that is varied, as base = "configs/gla_debug.toml"'
        )
    base = Path(file.sweep.base)
    Given().add_tables(read_toml(base), KeyInFile(str(base), base))  # a mistake in it would be every cell's
    fixed = _settings(file.set, f"{path}: [set]")
    grid = f"{path}: [grid]"
    axes = [_axis({key: values}, grid) for key, values in _keys(file.grid, grid)]
    axes += [_axis(table, f"{path}: [[axis]] {number},") for number, table in enumerate(file.axis, 1)]
    varied = [fixed, *(dict.fromkeys(key for _, own in axis for key in own) for axis in axes)]
    for one, other in itertools.combinations(varied, 2):
        for key in one.keys() & other.keys():
            raise ConfigError(f"{path}: {key} varies, and [set] or another axis gives it, too; leave one out")
    cells: dict[str, Settings] = {}
    # The last axis varies fastest.
    products = [
        (",".join(name for name, _ in points), {key: word for _, own in points for key, word in own.items()})
        for points in (itertools.product(*axes) if axes else ())
    ]
    for name, own in [*products, *_named(file.cells, path)]:
        if name in cells:
            raise ConfigError(
                f'{path}: two cells are named "{name}"; give one another name: [[axis]] names, or [[cells]] name'
            )
        cells[name] = fixed | own
    if not cells:
        raise ConfigError(
            f"{path}: no cell: give [grid] or [[axis]] lists of values, or [[cells]] with a name and its settings"
        )
    return Spec(path, file.sweep, cells)


# A point of an axis is what its cells are named for it, and their settings.
_Point = tuple[str, Settings]


def _keys(table: dict[str, Any], where: str) -> list[tuple[str, Any]]:
    """Return the dotted keys of a table with their values; refuse tables in it that are no sections."""
    values = list(flatten(table))
    refuse_unknown([(key, value) for key, value in values if isinstance(value, dict)], KeyInFile(where))
    return values


def _flat(table: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the values of a table by key."""
    found: dict[str, Any] = {}
    for key, value in _keys(table, where):
        if key in found:
            raise ConfigError(f"{where} {key}: is given twice; keep one")
        found[key] = value
    return found


def _settings(table: dict[str, Any], where: str) -> Settings:
    given, settings = Given(), {}
    for key, value in _flat(table, where).items():
        word = value if isinstance(value, str) else _toml(value)
        given.add(key, word, from_text, f"{where} {key}")
        if key in given.unread and given.unread[key].asks:
            raise given.unread[key].refused(key)
        if key in given.pending:
            raise ConfigError(
                f"{where} {key}: has a meaning only together with other keys; leave it to the base job, or use today's names"
            )
        if key in OWNED:
            raise ConfigError(f"{where} {key}: {OWNED[key]}; leave it out")
        settings[RENAMED[key].to if key in RENAMED else key] = word
    return settings


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False, default=str)


def _axis(table: dict[str, Any], where: str) -> list[_Point]:
    """Return the points of an axis, whose keys vary together; `names` are theirs."""
    columns = _flat(table, where)
    for key, values in columns.items():
        if not isinstance(values, tuple) or not values:
            raise ConfigError(
                f"{where} {key} = {show(values)}: expected a list of values; for one value, [set] is the place"
            )
    if len({len(values) for values in columns.values()}) > 1:
        found = ", ".join(f"{key} has {len(values)}" for key, values in columns.items())
        raise ConfigError(f"{where} lists of different lengths don't vary together: {found}; make them equal")
    names = columns.pop("names", None)
    points = [
        _settings(dict(zip(columns, row, strict=True)), where) for row in zip(*columns.values(), strict=True)
    ]
    return list(zip(map(str, names) if names else map(_name, points), points, strict=False))


def _named(tables: tuple[dict[str, Any], ...], path: str) -> Iterator[_Point]:
    for number, table in enumerate(tables, 1):
        own = dict(table)
        name = own.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(
                f'{path}: [[cells]] {number}, name is missing; give it one, as name = "compiled"'
            )
        yield name, _settings(own, f"{path}: cell {name},")


def _name(settings: Settings) -> str:
    """Name a point after its keys, without their sections where that is enough, and its values."""
    names = [key.name for key in keys().values()]
    words = {key: re.sub(r"[^A-Za-z0-9._+-]+", "-", word).strip("-") for key, word in settings.items()}
    short = {key: last if names.count(last := key.rpartition(".")[2]) == 1 else key for key in settings}
    return ",".join(f"{short[key]}={word}" for key, word in words.items())
