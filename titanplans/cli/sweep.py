"""`titanplans sweep`: a grid of jobs from a TOML file, one after another, and a table of their results.

A cell is a job with a folder of its own, in a `titanplans train` process: it locks its folder, resumes and ends as any job.
Read from the top: the file, its cells, running them, what they measured, the table. Exit status:

    0          every cell finished or was refused, and one at least finished
    1          a cell failed; the others have been run
    2          every cell was refused; or the file or the folder can't be used as it is, and nothing was run
    128 + N    stopped by signal N; the same command goes on
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
"""What a cell's arguments are appended to."""
RECORD, LOG = "cell.json", "log.txt"
_OWNED = {"job.dump_folder": "each cell has its own", "metrics.enable_jsonl": "the table is made from it"}
_SECONDS_TO_STOP = 20.0  # a job ends within some 10 s of a signal; then it is killed
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{,199}")  # file systems take 255 bytes


class Header(Options, section="sweep"):
    """[sweep]."""

    base: FilePath = "."
    """The job that is varied: the path of its TOML, from the folder where the command is started. Required."""

    dump_folder: FilePath | None = None
    """Folder for the cells and the tables; None: "outputs/" and the file's name."""

    description: str = ""
    """What the experiment is for; printed above the table."""

    time_limit_seconds: PositiveFloat | None = None
    """After how many seconds a cell is stopped, and has failed; None: never."""

    timing_skip_steps: NaturalInt = 3
    """Steps at the start of a cell that don't count for tokens/s."""


class SweepFile(Options):
    """The tables of a sweep file, whose keys are a job's."""

    sweep: Header = Header()
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Any] = Field(default_factory=dict)
    cells: tuple[dict[str, Any], ...] = ()


@dataclass
class Cell:
    """One job of a sweep: what it has over the base job, its command's arguments, and every key of the job."""

    name: str
    settings: dict[str, Any]
    folder: Path
    arguments: list[str]
    job: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    """Why its settings are none of a job."""

    def read(self) -> dict[str, Any]:
        """Return its record: "state" (finished, failed, refused), "reason", "seconds", "job"; {} if it was not run.

        Raises:
            ConfigError: it was run with other settings, or the record is not one of this release.
        """
        path = self.folder / RECORD
        try:
            record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            before = record["job"] if record else {}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no record of a cell ({error}); remove its folder") from error
        # Of a refused cell nothing was trained. A key that another release lacks is passed over.
        differing = describe_changes(before, self.job, ignored=before.keys() ^ self.job.keys())
        if differing and record["state"] != "refused":
            raise ConfigError(
                f"cell {self.name} was run with other settings ({differing}): remove {self.folder} to run it again, or name "
                "another [sweep] dump_folder"
            )
        return record

    def write(self, state: str, reason: str, seconds: float) -> None:
        """Write its record."""
        record = {"state": state, "reason": reason, "seconds": round(seconds, 1), "job": self.job}
        write_atomically(
            self.folder / RECORD, json.dumps(record | {"command": self.command}, indent=1) + "\n"
        )

    @property
    def command(self) -> str:
        """The command that runs this cell alone."""
        return shlex.join(["titanplans", "train", *self.arguments])


def read_sweep(path: str) -> tuple[Header, list[Cell]]:
    """Read a sweep file; the cells of the grid come first, its last key varying fastest.

    Raises:
        ConfigError: it can't be read, there is no cell, two have one name, a job has no seed, without which losses would
            differ by chance, or no cell is a job.
    """
    try:
        file = SweepFile(**read_toml(Path(path), "sweep file"))
    except OptionError as error:
        raise ConfigError(f"{path}: {error}") from None
    if "base" not in file.sweep.model_fields_set:
        raise ConfigError(
            f'{path}: sweep.base is missing: the varied job, as base = "configs/gla_debug.toml"'
        )
    folder, cells = Path(file.sweep.dump_folder or f"outputs/{Path(path).stem}"), {}
    for name, settings in _settings_by_name(file, path):
        if name in cells or not _FOLDER_NAME.fullmatch(name):
            why = "two have it" if name in cells else "it is a folder's, of letters, digits and ._=,+-"
            raise ConfigError(f'{path}: cell "{name}": {why}; name the cell in [[cells]]')
        for key in settings.keys() & _OWNED.keys():
            raise ConfigError(f"{path}: {key}: {_OWNED[key]}; leave it out")
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
                f"{path}: debug.seed is unset in cell {name}; give it in [set], or in the base job"
            )
        cell.job = json.loads(json.dumps(dict(flatten(job.to_dict()))))
    if not cells:
        raise ConfigError(f"{path}: no cell: give [grid] lists of values, or [[cells]] a name and settings")
    if all(cell.refusal for cell in cells.values()):
        raise ConfigError(f"{path}: {next(iter(cells.values())).refusal}")
    return file.sweep, list(cells.values())


def _settings_by_name(file: SweepFile, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    fixed, grid = dict(flatten(file.set)), dict(flatten(file.grid))
    for key, values in grid.items():
        if key in fixed:
            raise ConfigError(f"{path}: {key} varies in [grid], and [set] gives it, too; leave one out")
        if not isinstance(values, tuple) or not values:
            raise ConfigError(
                f"{path}: [grid] {key} = {show(values)}: expected a list; for one value there is [set]"
            )
    last = [key.name for key in keys().values()]
    for values in itertools.product(*grid.values()) if grid else ():
        point = dict(zip(grid, values, strict=True))
        # A key's name without its section, where no other section has it.
        short = {key: name if last.count(name := key.rpartition(".")[2]) == 1 else key for key in point}
        words = {key: re.sub(r"[^A-Za-z0-9._+-]+", "-", _word(point[key])).strip("-") for key in point}
        yield ",".join(f"{short[key]}={words[key]}" for key in point), fixed | point
    for number, table in enumerate(file.cells, 1):
        if not isinstance(name := table.get("name"), str):
            raise ConfigError(
                f'{path}: [[cells]] {number}, name is missing; give it one, as name = "compiled"'
            )
        yield name, fixed | dict(flatten({key: value for key, value in table.items() if key != "name"}))


def _word(value: Any) -> str:
    """Return a value of TOML as a word of the command line."""
    return value if isinstance(value, str) else show(value)


def run(cell: Cell, time_limit: float | None) -> tuple[str, str]:
    """Run a cell's job; return its state, and why it did not finish. A signal that stops the sweep stops the job."""
    with (cell.folder / LOG).open("a+", encoding="utf-8", errors="replace") as log:
        begin = log.tell()  # after what earlier runs have said
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
    """End a job that has not ended by itself; its ranks end with it."""
    process.terminate()
    try:
        process.wait(_SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


FIGURES = {
    "ranks": ",.0f",
    "first loss": ".5f",  # nats per token, as all losses
    "last loss": ".5f",
    "validation loss": ".5f",
    "tokens/s": ",.0f",
    "peak memory, GiB": ".2f",
    "collectives a step": ",.0f",
    "received a step, MB": ",.2f",
}
"""The measured columns, and how the text and the picture write them."""
_MEMORY = ("memory/max_reserved(GiB)", "memory/peak_rss(GiB)")
"""What an accelerator's allocator reserved, or on a CPU the resident set; of validations, with their prefix, too."""


def read_figures(folder: Path, skip_steps: int) -> dict[str, float]:
    """Return what a job logged, by the columns of FIGURES, as far as it did.

    tokens/s is the median over the logged intervals that begin after `skip_steps`; memory is the largest of all logged.
    """
    report = json.loads(file.read_text()) if (file := folder / "parallelism.json").is_file() else {}
    communicated = report.get("step") or {}
    files = [folder / FILE_NAME, *sorted(folder.glob(f"rank_*/{FILE_NAME}"))]
    by_rank = [read_metrics(file) for file in files if file.is_file()] or [[]]
    losses = [row[LOSS] for row in by_rank[0] if LOSS in row]
    validations = [row[VALIDATION_LOSS] for row in by_rank[0] if VALIDATION_LOSS in row]
    steps = [row for row in by_rank[0] if TOKENS in row]
    begins = [0, *(row["step"] for row in steps)]
    speeds = [row[TOKENS] for begin, row in zip(begins, steps, strict=False) if begin >= skip_steps]
    names = [prefix + name for prefix in ("", "validation_metrics/") for name in _MEMORY]
    memory = [row[name] for rows in by_rank for row in rows for name in names if name in row]
    values = [
        report.get("world_size"),
        losses[0] if losses else None,
        losses[-1] if losses else None,
        validations[-1] if validations else None,
        statistics.median(speeds) if speeds else None,
        max(memory, default=None),
        communicated.get("collectives"),
        communicated["bytes"] / 1e6 if "bytes" in communicated else None,
    ]
    return {title: value for title, value in zip(FIGURES, values, strict=True) if value is not None}


def write_tables(header: Header, cells: list[Cell]) -> str:
    """Write the results as table.csv, table.txt and table.png; return the text."""
    given = dict.fromkeys(key for cell in cells for key in cell.settings)
    varied = [key for key in given if len({str(cell.settings.get(key)) for cell in cells}) > 1]
    rows, lines = [], []
    for cell in cells:
        record = cell.read()
        state, reason = record.get("state", "not run"), record.get("reason", "")
        figures = read_figures(cell.folder, header.timing_skip_steps) if state == "finished" else {}
        row = {
            "cell": cell.name,
            **{key: _word(cell.settings.get(key, "")) for key in varied},
            "state": state,
        }
        rows.append(row | {title: figures.get(title, "") for title in FIGURES} | {"reason": reason})
        shown = [format(figures[title], spec) if title in figures else "" for title, spec in FIGURES.items()]
        lines.append([cell.name, *shown, f"{state}: {reason}" if reason else state])
    folder = cells[0].folder.parent
    with (folder / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    table = columns([["cell", *FIGURES, "state"], *lines], right=range(1, len(FIGURES) + 1))
    text = "\n".join([header.description, *table]).strip()
    write_atomically(folder / "table.txt", text + "\n")
    draw_bars(rows, FIGURES, folder / "table.png")
    return text


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="titanplans sweep",
        description="Run a grid of jobs, one after another, and write a table of their results.",
        allow_abbrev=False,
    )
    parser.add_argument("sweep", metavar="SWEEP.toml", help="which jobs (docs/training.md)")
    parser.add_argument(
        "--dry-run", action="store_true", help="list the cells and their commands; start nothing"
    )
    only = "run this cell only; may be given several times"
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help=only)
    return parser


def main(argv: list[str]) -> int:
    """Run the sweep that `argv` names; return the exit status, or raise a UserError."""
    arguments = parser().parse_args(argv)
    if "RANK" in os.environ:
        raise UserError("a sweep starts its jobs itself, on this machine; run it without torchrun")
    header, cells = read_sweep(arguments.sweep)
    if unknown := [name for name in arguments.only if name not in (names := [cell.name for cell in cells])]:
        raise ConfigError(
            f"--only {unknown[0]}: {arguments.sweep} has no such cell; there are {', '.join(names)}"
        )
    chosen = [cell for cell in cells if not arguments.only or cell.name in arguments.only]
    for cell in cells:
        cell.read()  # all before one runs
    states = {}
    for number, cell in enumerate(chosen, 1):
        states[cell.name] = cell.read().get("state", "not run")
        if arguments.dry_run:
            refusal = f"\n  would be refused: {cell.refusal}" * bool(cell.refusal)
            print(f"{cell.name}: {states[cell.name]}\n  {cell.command}{refusal}")
        elif states[cell.name] != "finished":
            print(f"[{number}/{len(chosen)}] {cell.name}: runs, {cell.folder / LOG}", flush=True)
            began = time.perf_counter()
            cell.write("failed", "it was stopped before its end", 0.0)  # which holds until it has ended
            ended = ("refused", cell.refusal) if cell.refusal else run(cell, header.time_limit_seconds)
            cell.write(*ended, time.perf_counter() - began)
            states[cell.name], reason = ended
            print(
                f"  {ended[0]} after {time.perf_counter() - began:.0f} s{': ' * bool(reason)}{reason}",
                flush=True,
            )
            write_tables(header, cells)
    if arguments.dry_run:
        return 0
    print(write_tables(header, cells))
    ends = set(states.values())
    return 2 if ends == {"refused"} else int("failed" in ends)
