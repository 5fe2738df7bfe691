"""The sweep file, read strictly: over which job, what all cells have, and what varies.

Keys are a job's, checked here one by one, so that a mistake is told before anything runs. Whether settings go
together is asked cell by cell (`titanplans.cli.sweep.cells`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from titanplans.config.refused import REFUSED
from titanplans.config.renamed import RENAMED
from titanplans.config.schema import keys
from titanplans.config.toml import read_toml
from titanplans.config.translate import PENDING, flatten, nearest, read_tables, unknown
from titanplans.config.values import NaturalInt, PositiveFloat, from_toml, show
from titanplans.errors import ConfigError

OWNED = {
    "job.dump_folder": "each cell has a folder of its own; [sweep] dump_folder says where",
    "metrics.enable_jsonl": "the table is made from these files, so the sweep switches them on",
}
"""Keys that the sweep itself gives to each cell, and why."""

_PARTS = ("sweep", "set", "grid", "axis", "cells")


@dataclass(frozen=True, kw_only=True)
class Header:
    """[sweep]."""

    base: str
    """The job that is varied: the path of its TOML, from the folder where the command is started."""

    dump_folder: str | None = None
    """Folder for the cells and the tables; None: "outputs/" and the file's name."""

    description: str = ""
    """What the experiment is for; stands above the table."""

    time_limit_seconds: PositiveFloat | None = None
    """After how long a cell is stopped; None: never."""

    timing_skip_steps: NaturalInt = 3
    """Steps at the start of a cell that don't count for tokens/s."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One dimension of the grid: lists of values, as long as each other, that vary together."""

    lists: dict[str, list[Any]]
    """By dotted key."""

    names: list[str] | None = None
    """What a cell's name says for each point; None: its keys and values."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A sweep file. Settings are by dotted key, under today's names, and of the key's type."""

    path: str
    header: Header
    fixed: dict[str, Any]
    """[set]: what every cell has, over the base job."""

    axes: list[Axis]
    """[grid], each of whose keys is an axis, and [[axis]]; the cells are their product."""

    named: dict[str, dict[str, Any]]
    """[[cells]], by name."""

    @property
    def folder(self) -> Path:
        """Where the cells and the tables are written."""
        return Path(self.header.dump_folder or f"outputs/{Path(self.path).stem}")


def read_spec(path: str) -> Spec:
    """Read a sweep file.

    Raises:
        ConfigError: it can't be read, its base job can't, or it has an unknown key, a value of another type, or no cell.
    """
    document = read_toml(Path(path), "sweep file")
    for part in document:
        if part not in _PARTS:
            raise ConfigError(f"{path}: {_unknown_part(part)}")
    header = _header(_table(document.get("sweep", {}), f"{path}: [sweep]"), f"{path}: [sweep]")
    read_tables(read_toml(Path(header.base)), header.base)  # a mistake in it would be every cell's
    where = f"{path}: [set]"
    fixed = _settings(_table(document.get("set", {}), where), where)
    spec = Spec(
        path=path, header=header, fixed=fixed, axes=_axes(document, path), named=_named(document, path)
    )
    _check_axes(spec)
    return spec


def _unknown_part(part: str) -> str:
    if part in {key.split(".")[0] for key in keys()}:
        return f"[{part}] is a job's section, and stands under [set.{part}] or [grid.{part}] here"
    meant = nearest(part, {name: name for name in _PARTS})
    return f"no part {part}; " + (f"did you mean {meant}?" if meant else f"there are {', '.join(_PARTS)}")


def _header(table: dict[str, Any], where: str) -> Header:
    hints = get_type_hints(Header, include_extras=True)
    names = {item.name: item.name for item in fields(Header)}
    values = {}
    for key, raw in table.items():
        if key not in names:
            meant = nearest(key, names)
            there = f"did you mean {meant}?" if meant else f"there are {', '.join(names)}"
            raise ConfigError(f"{where} {key}: no such key; {there}")
        values[key] = from_toml(raw, hints[key], f"{where} {key}")
    if "base" not in values:
        raise ConfigError(
            f'{where} base is missing: the job that is varied, as base = "configs/gla_debug.toml"'
        )
    return Header(**values)


def _settings(table: dict[str, Any], where: str) -> dict[str, Any]:
    """Return single values by today's key."""
    settings: dict[str, Any] = {}
    for written, raw in flatten(table, "", where):
        key = _key(written, f"{where} {written}")
        if key in settings:
            raise ConfigError(f"{where} {written}: {key} is given twice; keep one")
        settings[key] = _value(key, raw, f"{where} {written}")
    return settings


def _lists(table: dict[str, Any], where: str) -> dict[str, list[Any]]:
    """Return lists of values by today's key."""
    lists: dict[str, list[Any]] = {}
    for written, raw in flatten(table, "", where):
        key = _key(written, f"{where} {written}")
        if key in lists:
            raise ConfigError(f"{where} {written}: {key} is given twice; keep one")
        if not isinstance(raw, list):
            raise ConfigError(
                f"{where} {written} = {show(raw)}: expected a list of values; for one value, [set] is the place"
            )
        if not raw:
            raise ConfigError(
                f"{where} {written} = []: no value, so no cell; give at least one, or leave it out"
            )
        lists[key] = [_value(key, value, f"{where} {written}") for value in raw]
    return lists


def _axes(document: dict[str, Any], path: str) -> list[Axis]:
    where = f"{path}: [grid]"
    lists = _lists(_table(document.get("grid", {}), where), where)
    axes = [Axis(lists={key: values}) for key, values in lists.items()]
    for number, table in enumerate(_tables(document, "axis", path), 1):
        where = f"{path}: [[axis]] {number},"
        lists = _lists({key: value for key, value in table.items() if key != "names"}, where)
        if not lists:
            raise ConfigError(f"{where} no key varies; give it a job's keys with lists of values")
        names = from_toml(table["names"], list[str], f"{where} names") if "names" in table else None
        lengths = {key: len(values) for key, values in lists.items()} | (
            {"names": len(names)} if names else {}
        )
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            raise ConfigError(
                f"{where} lists of different lengths don't vary together: {told}; make them equal"
            )
        axes.append(Axis(lists=lists, names=names or None))
    return axes


def _named(document: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    named: dict[str, dict[str, Any]] = {}
    for number, table in enumerate(_tables(document, "cells", path), 1):
        where = f"{path}: [[cells]] {number},"
        if "name" not in table:
            raise ConfigError(f'{where} name is missing; give it one, as name = "compiled"')
        name = from_toml(table["name"], str, f"{where} name")
        if name in named:
            raise ConfigError(
                f'{where} name = "{name}" is given twice; names are folders, so give it another'
            )
        named[name] = _settings(
            {key: value for key, value in table.items() if key != "name"}, f"{path}: cell {name},"
        )
    return named


def _check_axes(spec: Spec) -> None:
    if not spec.axes and not spec.named:
        raise ConfigError(
            f"{spec.path}: no cell: give [grid] or [[axis]] lists of values, or [[cells]] with a name and its settings"
        )
    seen = {key: "[set]" for key in spec.fixed}
    for axis in spec.axes:
        for key in axis.lists:
            if key in seen:
                raise ConfigError(
                    f"{spec.path}: {key} varies, and {seen[key]} gives it, too; leave it out of one of them"
                )
        seen |= dict.fromkeys(axis.lists, "another axis")


def _key(written: str, where: str) -> str:
    today = RENAMED[written].to if written in RENAMED else written
    if today in OWNED:
        raise ConfigError(f"{where}: {OWNED[today]}; leave it out")
    if today in PENDING:
        raise ConfigError(
            f"{where}: is read beside other keys of flame's only; give training.seq_len or dataset"
        )
    if today not in keys() and today not in REFUSED:
        raise ConfigError(f"{where}: {unknown(written)}")
    return today


def _value(key: str, raw: Any, where: str) -> Any:
    """Return `raw` as a value of the key's type; "none" unsets a key that may be unset, as on the command line."""
    if key not in keys():
        return raw  # refused by name, which is the cell's result and not the file's mistake
    hint = keys()[key].hint
    if isinstance(raw, str) and raw.lower() == "none" and NoneType in get_args(hint):
        return None
    return from_toml(raw, hint, where)


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} = {show(value)}: expected a table")
    return value


def _tables(document: dict[str, Any], part: str, path: str) -> Iterable[dict[str, Any]]:
    tables = document.get(part, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: {part} is a list of tables; write [[{part}]]")
    return tables
