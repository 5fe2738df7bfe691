"""`titanplans sweep`: run a grid of jobs from a TOML file, one after another, and write a table of their results.

A cell is one job, which `titanplans train` runs in a separate process and folder, so that it locks its folder and resumes
like any job. Start at `main`. Exit status:

    0          every cell finished or was refused, and at least one finished
    1          a cell failed; the other cells have been run
    2          every cell was refused; or the file or the folder can't be used, and nothing has been run
    128 + N    stopped by signal N; run the same command to continue
"""

import argparse
import csv
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from titanplans.cli.plot import LOSS, TOKENS, VALIDATION_LOSS, draw_bars
from titanplans.config import load_job
from titanplans.config.options import Options, read_toml
from titanplans.config.schema import keys
from titanplans.config.translate import flatten
from titanplans.config.values import FilePath, NaturalInt, PositiveFloat
from titanplans.disk import write_atomically
from titanplans.errors import ConfigError, OptionError, UserError
from titanplans.text import columns, show
from titanplans.training.checkpoint.manifest import describe_changes
from titanplans.training.launch.orphans import end_with_parent
from titanplans.training.launch.signals import stop_on_signals
from titanplans.training.trainer.jsonl import FILE_NAME, read_metrics

TRAIN = [sys.executable, "-m", "titanplans", "train"]
"""The command to which a cell's arguments are appended."""
RECORD, LOG = "cell.json", "log.txt"
_SET_BY_SWEEP = {
    "job.dump_folder": "each cell has a separate folder",
    "metrics.enable_jsonl": "the table is made from the file that it writes",
}
"""Keys that a sweep file may not set, and why."""
_SECONDS_TO_STOP = 20.0  # a job ends about 10 s after a signal; after this time it is killed
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{,199}")  # file systems allow 255 bytes


class Header(Options, section="sweep"):
    """[sweep]."""

    base: FilePath = "."
    """Path of the base job's TOML file, relative to the folder in which the command is started. Required."""

    dump_folder: FilePath | None = None
    """Folder for the cells and the tables. None: "outputs/" and the name of the sweep file."""

    description: str = ""
    """What the experiment is for; printed above the table."""

    time_limit_seconds: PositiveFloat | None = None
    """Time after which a cell is stopped and counts as failed. None: no limit."""

    timing_skip_steps: NaturalInt = 3
    """Number of steps at the beginning of a cell that are left out of tokens/s."""


class SweepFile(Options):
    """The tables of a sweep file. All tables except [sweep] have the keys of a job."""

    sweep: Header = Header()
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Any] = Field(default_factory=dict)
    cells: tuple[dict[str, Any], ...] = ()


@dataclass
class Cell:
    """One job of a sweep: its changes to the base job, the arguments of its command, and all values of the job."""

    name: str
    settings: dict[str, Any]
    folder: Path
    arguments: list[str]
    job: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    """Why the settings do not make a valid job; "" if they do."""

    def read(self) -> dict[str, Any]:
        """Return the cell's record: "state" (finished, failed, refused), "reason", "seconds", "job"; {} if it was not run.

        Raises:
            ConfigError: the cell was run with other settings, or its record can't be read.
        """
        path = self.folder / RECORD
        try:
            record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            previous = record["job"] if record else {}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not the record of a cell ({error}): remove its folder") from error
        # A refused cell has trained nothing, so its settings may change. Keys that only the record or
        # only the job has are ignored, since another release may have written the record.
        changes = describe_changes(previous, self.job, ignored=previous.keys() ^ self.job.keys())
        if changes and record["state"] != "refused":
            raise ConfigError(
                f"cell {self.name} was run with other settings ({changes}): remove {self.folder} to run it again, or set "
                "another [sweep] dump_folder"
            )
        return record

    def write(self, state: str, reason: str, seconds: float) -> None:
        """Write the cell's record."""
        record = {"state": state, "reason": reason, "seconds": round(seconds, 1), "job": self.job}
        write_atomically(
            self.folder / RECORD, json.dumps(record | {"command": self.command}, indent=1) + "\n"
        )

    @property
    def command(self) -> str:
        """The command that runs only this cell."""
        return shlex.join(["titanplans", "train", *self.arguments])


def read_sweep(path: str) -> tuple[Header, list[Cell]]:
    """Read a sweep file. Cells of the grid come first; the last key of the grid varies fastest.

    Raises:
        ConfigError: the file can't be read, there are no cells, two cells have the same name, no cell is a valid job, or a
            job has no seed, so that losses would differ by chance.
    """
    try:
        file = SweepFile(**read_toml(Path(path), "sweep file"))
    except OptionError as error:
        raise ConfigError(f"{path}: {error}") from None
    if "base" not in file.sweep.model_fields_set:
        raise ConfigError(
            f'{path}: sweep.base is missing: set the base job, such as base = "configs/gla_debug.toml"'
        )
    folder, cells = Path(file.sweep.dump_folder or f"outputs/{Path(path).stem}"), {}
    for name, settings in _settings_by_name(file, path):
        if name in cells or not _FOLDER_NAME.fullmatch(name):
            why = (
                "two cells have this name"
                if name in cells
                else "it is a folder's name, and may have only letters, digits and ._=,+-"
            )
            raise ConfigError(f'{path}: cell "{name}": {why}: name the cell in [[cells]]')
        for key in settings.keys() & _SET_BY_SWEEP.keys():
            raise ConfigError(f"{path}: {key} can't be set, because {_SET_BY_SWEEP[key]}; remove the key")
        cell = cells[name] = Cell(name, settings, folder / name, [file.sweep.base])
        values = {"job.dump_folder": str(cell.folder), "metrics.enable_jsonl": True} | settings
        cell.arguments += [f"--{key}={_word(value)}" for key, value in values.items()]
        try:
            job = load_job(cell.arguments)
        except ConfigError as error:
            cell.refusal = str(error)
            continue
        if job.debug.seed is None:
            raise ConfigError(
                f"{path}: debug.seed is unset in cell {name}: set it in [set] or in the base job"
            )
        cell.job = json.loads(json.dumps(dict(flatten(job.to_dict()))))
    if not cells:
        raise ConfigError(
            f"{path}: there are no cells: add a [grid] with lists of values, or [[cells]] with names"
        )
    if all(cell.refusal for cell in cells.values()):
        raise ConfigError(f"{path}: {next(iter(cells.values())).refusal}")
    return file.sweep, list(cells.values())


def _settings_by_name(file: SweepFile, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    fixed, grid = dict(flatten(file.set)), dict(flatten(file.grid))
    for key, values in grid.items():
        if key in fixed:
            raise ConfigError(f"{path}: {key} is in both [grid] and [set]: remove one")
        if not isinstance(values, tuple) or not values:
            raise ConfigError(
                f"{path}: [grid] {key} = {show(values)}: expected a list: use [set] for a single value"
            )
    names = [key.name for key in keys().values()]
    for values in itertools.product(*grid.values()) if grid else ():
        point = dict(zip(grid, values, strict=True))
        # Names of cells have keys without their sections, unless two sections have a key of the same name.
        short = {key: name if names.count(name := key.rpartition(".")[2]) == 1 else key for key in point}
        words = {key: re.sub(r"[^A-Za-z0-9._+-]+", "-", _word(point[key])).strip("-") for key in point}
        yield ",".join(f"{short[key]}={words[key]}" for key in point), fixed | point
    for index, table in enumerate(file.cells, 1):
        if not isinstance(name := table.get("name"), str):
            raise ConfigError(f'{path}: [[cells]] {index} has no name: add one, such as name = "compiled"')
        yield name, fixed | dict(flatten({key: value for key, value in table.items() if key != "name"}))


def _word(value: Any) -> str:
    """Return a TOML value as a command-line argument."""
    return value if isinstance(value, str) else show(value)


def run(cell: Cell, time_limit: float | None) -> tuple[str, str]:
    """Run a cell's job; return its state, and the reason if it did not finish. Signals to the sweep also stop the job."""
    with (cell.folder / LOG).open("a+", encoding="utf-8", errors="replace") as log:
        begin = log.tell()  # earlier runs wrote to the same log
        process = subprocess.Popen(
            [*TRAIN, *cell.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        try:
            with stop_on_signals():
                status = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            return "failed", f"stopped at [sweep] time_limit_seconds = {time_limit:g}"
        finally:
            _stop(process)
        log.seek(begin)
        lines = [line.strip() for line in log if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = "" if status == 0 else (errors or lines or [f"exit status {status}"])[-1]
    return {0: "finished", 2: "refused"}.get(status, "failed"), reason


def _stop(process: subprocess.Popen) -> None:
    """End the job and its ranks, if it still runs."""
    process.terminate()
    try:
        process.wait(_SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


METRICS = {
    "ranks": ",.0f",
    "first loss": ".5f",  # losses are in nats per token
    "last loss": ".5f",
    "validation loss": ".5f",
    "tokens/s": ",.0f",
    "peak memory, GiB": ".2f",
    "collectives per step": ",.0f",
    "received per step, MB": ",.2f",
}
"""The columns with measurements, and their formats in the text and the picture."""
_MEMORY = ("memory/max_reserved(GiB)", "memory/peak_rss(GiB)")
"""Memory that the accelerator's allocator reserved, or on a CPU the resident set size."""


def read_cell_metrics(folder: Path, skip_steps: int) -> dict[str, float]:
    """Return the metrics that a job logged, by column of METRICS. Columns without a value are left out.

    tokens/s is the median over the logged intervals that begin after `skip_steps`. Memory is the maximum over all ranks,
    intervals and validations.
    """
    report = json.loads(file.read_text()) if (file := folder / "parallelism.json").is_file() else {}
    communication = report.get("step") or {}
    files = [folder / FILE_NAME, *sorted(folder.glob(f"rank_*/{FILE_NAME}"))]
    by_rank = [read_metrics(file) for file in files if file.is_file()] or [[]]
    losses = [row[LOSS] for row in by_rank[0] if LOSS in row]
    validations = [row[VALIDATION_LOSS] for row in by_rank[0] if VALIDATION_LOSS in row]
    steps = [row for row in by_rank[0] if TOKENS in row]
    interval_begins = [0, *(row["step"] for row in steps)]
    speeds = [row[TOKENS] for begin, row in zip(interval_begins, steps, strict=False) if begin >= skip_steps]
    names = [prefix + name for prefix in ("", "validation_metrics/") for name in _MEMORY]
    memory = [row[name] for rows in by_rank for row in rows for name in names if name in row]
    values = [
        report.get("world_size"),
        losses[0] if losses else None,
        losses[-1] if losses else None,
        validations[-1] if validations else None,
        statistics.median(speeds) if speeds else None,
        max(memory, default=None),
        communication.get("collectives"),
        communication["bytes"] / 1e6 if "bytes" in communication else None,
    ]
    return {title: value for title, value in zip(METRICS, values, strict=True) if value is not None}


def write_tables(header: Header, cells: list[Cell]) -> str:
    """Write the results of all cells as table.csv, table.txt and table.png; return the text."""
    all_keys = dict.fromkeys(key for cell in cells for key in cell.settings)
    varied = [key for key in all_keys if len({str(cell.settings.get(key)) for cell in cells}) > 1]
    rows, lines = [], []
    for cell in cells:
        record = cell.read()
        state, reason = record.get("state", "not run"), record.get("reason", "")
        metrics = read_cell_metrics(cell.folder, header.timing_skip_steps) if state == "finished" else {}
        row = {
            "cell": cell.name,
            **{key: _word(cell.settings.get(key, "")) for key in varied},
            "state": state,
        }
        rows.append(row | {title: metrics.get(title, "") for title in METRICS} | {"reason": reason})
        texts = [format(metrics[title], spec) if title in metrics else "" for title, spec in METRICS.items()]
        lines.append([cell.name, *texts, f"{state}: {reason}" if reason else state])
    folder = cells[0].folder.parent
    with (folder / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    table = columns([["cell", *METRICS, "state"], *lines], right=range(1, len(METRICS) + 1))
    text = "\n".join([header.description, *table]).strip()
    write_atomically(folder / "table.txt", text + "\n")
    draw_bars(rows, METRICS, folder / "table.png")
    return text


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="titanplans sweep",
        description="Run a grid of jobs, one after another, and write a table of their results.",
        allow_abbrev=False,
    )
    parser.add_argument("sweep", metavar="SWEEP.toml", help="the sweep file (docs/training.md)")
    parser.add_argument(
        "--dry-run", action="store_true", help="list the cells and their commands, but run nothing"
    )
    only = "run only this cell; may be repeated"
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help=only)
    return parser


def main(argv: list[str]) -> int:
    """Run the sweep of the command line `argv`; return the exit status.

    Raises:
        UserError: the file or the folder can't be used. Nothing was run.
    """
    arguments = parser().parse_args(argv)
    if "RANK" in os.environ:
        raise UserError("titanplans sweep starts its jobs itself, on this machine: run it without torchrun")
    header, cells = read_sweep(arguments.sweep)
    if unknown := [name for name in arguments.only if name not in (names := [cell.name for cell in cells])]:
        raise ConfigError(
            f"--only {unknown[0]}: {arguments.sweep} has no such cell; there are {', '.join(names)}"
        )
    to_run = [cell for cell in cells if not arguments.only or cell.name in arguments.only]
    for cell in cells:
        cell.read()  # raises an error before any cell runs
    states = {}
    for index, cell in enumerate(to_run, 1):
        states[cell.name] = cell.read().get("state", "not run")
        if arguments.dry_run:
            refusal = f"\n  would be refused: {cell.refusal}" * bool(cell.refusal)
            print(f"{cell.name}: {states[cell.name]}\n  {cell.command}{refusal}")
        elif states[cell.name] != "finished":
            print(f"[{index}/{len(to_run)}] {cell.name}: runs, {cell.folder / LOG}", flush=True)
            start = time.perf_counter()
            # This record remains if the process is killed while the cell runs.
            cell.write("failed", "it was stopped before its end", 0.0)
            state, reason = (
                ("refused", cell.refusal) if cell.refusal else run(cell, header.time_limit_seconds)
            )
            cell.write(state, reason, time.perf_counter() - start)
            states[cell.name] = state
            print(
                f"  {state} after {time.perf_counter() - start:.0f} s{': ' * bool(reason)}{reason}",
                flush=True,
            )
            write_tables(header, cells)
    if arguments.dry_run:
        return 0
    print(write_tables(header, cells))
    outcomes = set(states.values())
    return 2 if outcomes == {"refused"} else int("failed" in outcomes)
