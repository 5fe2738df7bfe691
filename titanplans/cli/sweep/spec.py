"""The sweep file: the base job and the settings of each cell.

Keys are a job's. Each key and value is checked here, before anything runs. Whether a cell's settings contradict each
other is found in `titanplans.cli.sweep.cells`.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from titanplans.config.lines import TomlSource
from titanplans.config.options import Options, read_toml
from titanplans.config.paths import FilePath
from titanplans.config.schema import keys
from titanplans.config.translate import Layer, flatten, read_tables
from titanplans.config.values import NaturalInt, PositiveFloat, from_toml
from titanplans.errors import ConfigError, OptionError, nearest
from titanplans.text import show

OWNED = {
    "job.dump_folder": "each cell has a folder of its own; [sweep] dump_folder says where",
    "metrics.enable_jsonl": "the table is made from these files, so the sweep switches them on",
}
"""Keys that the sweep itself gives to each cell, and why."""

_PARTS = ("sweep", "set", "grid", "axis", "cells")

Settings = dict[str, Any]
"""Values of their keys' types, by today's dotted key."""


class Header(Options):
    """[sweep]."""

    section = "sweep"

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


@dataclass(frozen=True)
class Spec:
    """A sweep file."""

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
    document = read_toml(Path(path), "sweep file")
    for part in document:
        if part not in _PARTS:
            raise ConfigError(f"{path}: {_unknown_part(part)}")
    header = _header(_table(document, "sweep", path), path)
    base = Path(header.base)
    read_tables(read_toml(base), TomlSource(header.base, base))  # a mistake in it would be every cell's
    fixed = _settings(_table(document, "set", path), f"{path}: [set]")
    grid = f"{path}: [grid]"
    axes = [
        _axis({key: values}, grid)
        for key, values in flatten(_table(document, "grid", path), "", TomlSource(grid))
    ]
    for number, table in enumerate(_tables(document, "axis", path), 1):
        axes.append(_axis(table, f"{path}: [[axis]] {number},"))
    _check_axes(path, fixed, axes)
    cells: dict[str, Settings] = {}
    for name, own in [*_product(axes), *_named(document, path)]:
        if name in cells:
            raise ConfigError(
                f'{path}: two cells are named "{name}"; give one another name: [[axis]] names, or [[cells]] name'
            )
        cells[name] = fixed | own
    if not cells:
        raise ConfigError(
            f"{path}: no cell: give [grid] or [[axis]] lists of values, or [[cells]] with a name and its settings"
        )
    return Spec(path, header, cells)


# A point of an axis is what its cells are named for it, and their settings.
_Point = tuple[str, Settings]


def _unknown_part(part: str) -> str:
    if part in {key.partition(".")[0] for key in keys()}:
        return f"[{part}] is a job's section, and stands under [set.{part}] or [grid.{part}] here"
    meant = nearest(part, _PARTS)
    return f"no part {part}; " + (f"did you mean {meant}?" if meant else f"there are {', '.join(_PARTS)}")


def _header(table: dict[str, Any], path: str) -> Header:
    try:
        header = Header(**table)
    except OptionError as error:
        raise ConfigError(f"{path}: {error}") from None
    if "base" not in table:
        raise ConfigError(
            f'{path}: sweep.base is missing: the job that is varied, as base = "configs/gla_debug.toml"'
        )
    return header


def _settings(table: dict[str, Any], where: str) -> Settings:
    layer, written = Layer(), set()
    for key, raw in flatten(table, "", TomlSource(where)):
        if key in written:
            raise ConfigError(f"{where} {key}: is given twice; keep one")
        written.add(key)
        layer.add(key, raw, _value, f"{where} {key}")
    for key, unread in layer.unread.items():
        if unread.asks:
            raise unread.refused(key)
    for key in layer.pending:
        raise ConfigError(
            f"{where} {key}: has a meaning only together with other keys; leave it to the base job, or use today's names"
        )
    for key in OWNED:
        if key in layer.values:
            raise ConfigError(f"{where} {key}: {OWNED[key]}; leave it out")
    return layer.values


def _value(raw: Any, hint: Any, where: object) -> Any:
    """Read a value; "none" unsets a key that may be unset, as on the command line."""
    if isinstance(raw, str) and raw.lower() == "none" and NoneType in get_args(hint):
        return None
    return from_toml(raw, hint, where)


def _axis(table: dict[str, Any], where: str) -> list[_Point]:
    """Return the points of an axis, whose keys vary together; `names` are theirs."""
    columns: dict[str, list[Any]] = {}
    for key, values in flatten(
        {key: value for key, value in table.items() if key != "names"}, "", TomlSource(where)
    ):
        if not isinstance(values, list):
            raise ConfigError(
                f"{where} {key} = {show(values)}: expected a list of values; for one value, [set] is the place"
            )
        if not values:
            raise ConfigError(f"{where} {key} = []: no value, so no cell; give at least one, or leave it out")
        columns[key] = values
    if not columns:
        raise ConfigError(f"{where} no key varies; give it a job's keys with lists of values")
    names = from_toml(table.get("names", []), tuple[str, ...], f"{where} names")
    lengths = {key: len(column) for key, column in (columns | ({"names": names} if names else {})).items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise ConfigError(f"{where} lists of different lengths don't vary together: {found}; make them equal")
    points = [
        _settings(dict(zip(columns, values, strict=True)), where)
        for values in zip(*columns.values(), strict=True)
    ]
    return list(zip(names or map(_name, points), points, strict=True))


def _check_axes(path: str, fixed: Settings, axes: list[list[_Point]]) -> None:
    seen = dict.fromkeys(fixed, "[set]")
    for axis in axes:
        own = {key for _, settings in axis for key in settings}
        for key in sorted(own & seen.keys()):
            raise ConfigError(
                f"{path}: {key} varies, and {seen[key]} gives it, too; leave it out of one of them"
            )
        seen |= dict.fromkeys(own, "another axis")


def _product(axes: list[list[_Point]]) -> Iterable[_Point]:
    """Yield the cells of the grid, the last axis varying fastest."""
    for points in itertools.product(*axes) if axes else ():
        merged = {key: value for _, settings in points for key, value in settings.items()}
        yield ",".join(name for name, _ in points), merged


def _named(document: dict[str, Any], path: str) -> Iterable[_Point]:
    for number, table in enumerate(_tables(document, "cells", path), 1):
        if "name" not in table:
            raise ConfigError(
                f'{path}: [[cells]] {number}, name is missing; give it one, as name = "compiled"'
            )
        name = from_toml(table["name"], str, f"{path}: [[cells]] {number}, name")
        own = {key: value for key, value in table.items() if key != "name"}
        yield name, _settings(own, f"{path}: cell {name},")


def _name(settings: Settings) -> str:
    """Name a point after its keys and values."""
    return ",".join(f"{_short(key)}={_word(value)}" for key, value in settings.items())


def _short(dotted: str) -> str:
    """Return a key without its section, where no other section has one of that name."""
    last = dotted.rpartition(".")[2]
    return last if [key.name for key in keys().values()].count(last) == 1 else dotted


def _word(value: Any) -> str:
    text = "none" if value is None else show(value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")


def _table(document: dict[str, Any], part: str, path: str) -> dict[str, Any]:
    table = document.get(part, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [{part}] = {show(table)}: expected a table")
    return table


def _tables(document: dict[str, Any], part: str, path: str) -> Iterable[dict[str, Any]]:
    tables = document.get(part, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: {part} is a list of tables; write [[{part}]]")
    return tables
