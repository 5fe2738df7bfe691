"""The command line: read the sweep, run the cells that are not done, write the table after each.

    0          every cell finished or was refused
    1          a cell failed or exceeded its time limit; the others have been run
    2          the sweep can't be run as written: one line says why, and nothing was run
    128 + N    stopped by signal N; the same command continues

A cell that has finished with the same settings is not run again. One that was refused, failed or was interrupted is run
again, and resumes from its checkpoint if its job writes any. If the settings of a cell that has finished or holds a
checkpoint have changed, the sweep is refused; --rerun deletes what such cells wrote.
"""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import NoReturn

from titanplans.cli.sweep import table
from titanplans.cli.sweep.cells import Cell, make_cells, refusal, select
from titanplans.cli.sweep.figures import FIGURES, read_figures
from titanplans.cli.sweep.process import LOG, only_sweep, run_cell
from titanplans.cli.sweep.record import Record, changes, new_record, read_record, write_record
from titanplans.cli.sweep.spec import Spec, read_spec
from titanplans.config import ConfigError
from titanplans.errors import UserError
from titanplans.training.logs import init_logging
from titanplans.training.signals import Stopped

_RERUN = ("changed", "all")
Tell = Callable[[str], None]


def main(argv: list[str]) -> int:
    """Run the sweep that `argv` names; return the exit status."""
    try:
        arguments = _parse(argv)
        if "RANK" in os.environ:
            raise UserError("a sweep starts its jobs itself, on this machine; run it without torchrun")
        spec = read_spec(arguments.sweep)
        cells = make_cells(spec)
        chosen = select(spec, cells, arguments.only)
        if arguments.dry_run:
            return _dry_run(chosen, arguments.rerun)
        with only_sweep(spec.folder) as lock:
            return _run(spec, cells, chosen, arguments.rerun, lock)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        return stopped.exit_status
    except KeyboardInterrupt:  # between two cells
        return 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see titanplans sweep --help")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="titanplans sweep",
        description="Run a grid of jobs, one after another, and write a table of their results.",
    )
    parser.add_argument("sweep", metavar="SWEEP.toml", help="which jobs (docs/sweep.md)")
    parser.add_argument("--dry-run", action="store_true", help="list the cells; start nothing, write nothing")
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        default=[],
        help="run this cell only; may be given several times",
    )
    parser.add_argument(
        "--rerun",
        choices=_RERUN,
        help="run finished cells again, whose settings have changed, or all of them; what they wrote is deleted",
    )
    return parser.parse_args(argv)


def _dry_run(cells: list[Cell], rerun: str | None) -> int:
    with redirect_stdout(sys.stderr):
        init_logging(0)  # what libraries say when they are imported
    for cell in cells:
        record = read_record(cell)
        print(f"{cell.name}: {_plan(cell, record, rerun)}")
        print(f"  {cell.command}")
        if (why := refusal(cell)) is not None:
            print(f"  would be refused: {why}")
    return 0


def _plan(cell: Cell, record: Record | None, rerun: str | None) -> str:
    if record is None:
        return "to run"
    kept, changed = _worth_keeping(cell, record), changes(cell, record)
    if kept and changed and rerun is None:
        return f"{kept} with other settings ({'; '.join(changed)})"
    if record.state != "finished" or changed:
        return f"to run again ({record.state} before)"
    return "to run again (finished before)" if rerun == "all" else "finished"


def _run(spec: Spec, cells: list[Cell], chosen: list[Cell], rerun: str | None, lock: int) -> int:
    records = {cell.name: read_record(cell) for cell in cells}
    if rerun is None:
        _refuse_changed(spec, chosen, records)
    for cell in chosen:
        record = records[cell.name]
        if record is not None and (changes(cell, record) or (rerun == "all" and record.state == "finished")):
            # All before the first runs: if this sweep is killed, no table mixes its figures with earlier ones.
            shutil.rmtree(cell.folder)
            records[cell.name] = None
    rows = {cell.name: _row(cell, records[cell.name]) for cell in cells}
    for cell in chosen:
        tell = _teller(cell, cells)
        record = records[cell.name]
        if record is not None and record.state == "finished":
            if record.timing_skip_steps != spec.header.timing_skip_steps:
                _measure(spec, cell, record)
            tell("finished before")
            continue
        record = new_record(cell)
        signum = _run_one(spec, cell, record, lock, tell)
        rows[cell.name] = table.Row(cell, record)
        tables = _write_tables(spec, list(rows.values()))
        if signum is not None:
            print(f"stopped; {tables}; the same command goes on", flush=True)
            raise Stopped(signum)
    print(_write_tables(spec, list(rows.values())))
    return 1 if any(rows[cell.name].state in ("failed", "timed out") for cell in chosen) else 0


def _refuse_changed(spec: Spec, chosen: list[Cell], records: dict[str, Record | None]) -> None:
    """Refuse cells whose results or checkpoints come from other settings; only --rerun deletes those."""
    for cell in chosen:
        record = records[cell.name]
        kept = None if record is None else _worth_keeping(cell, record)
        if record is not None and kept and (changed := changes(cell, record)):
            raise ConfigError(
                f"{spec.path}: cell {cell.name} {kept} with other settings: {'; '.join(changed)}: --rerun changed runs "
                "such cells again and deletes what they wrote, [sweep] dump_folder can name a new folder"
            )


def _worth_keeping(cell: Cell, record: Record) -> str | None:
    if record.state == "finished":
        return "has finished"
    if record.job is not None and (cell.folder / record.job["checkpoint.folder"]).exists():
        return "has a checkpoint"
    return None


def _row(cell: Cell, record: Record | None) -> table.Row:
    if record is not None and changes(cell, record):
        return table.Row(cell, None, outdated=True)
    return table.Row(cell, record)


def _run_one(spec: Spec, cell: Cell, record: Record, lock: int, tell: Tell) -> int | None:
    """Run one cell into its record; return the signal that stopped the sweep, or None."""
    if cell.refusal is not None:
        record.state, record.exit_status, record.line = "refused", 2, cell.refusal
        write_record(cell, record)
        tell(f"refused: {cell.refusal}")
        return None
    write_record(cell, record)
    tell(f"runs, {cell.folder / LOG}")
    ended = run_cell(cell.arguments, cell.folder, lock, spec.header.time_limit_seconds)
    record.state, record.exit_status, record.line = ended.state, ended.exit_status, ended.line
    record.seconds = round(ended.seconds, 1)
    if ended.state == "finished":
        _measure(spec, cell, record)
    write_record(cell, record)
    row = table.Row(cell, record)
    shown = [f"{figure.title} {row.shown(figure)}" for figure in FIGURES if row.shown(figure)]
    told = ended.line or ", ".join(shown)
    tell(f"{ended.state} after {ended.seconds:.0f} s{': ' if told else ''}{told}")
    return ended.signum


def _measure(spec: Spec, cell: Cell, record: Record) -> None:
    record.timing_skip_steps = spec.header.timing_skip_steps
    record.figures = read_figures(cell.folder, record.timing_skip_steps)
    write_record(cell, record)


def _teller(cell: Cell, cells: list[Cell]) -> Tell:
    place = f"[{cells.index(cell) + 1}/{len(cells)}] {cell.name}"
    return lambda text: print(f"{place}: {text}", flush=True)


def _write_tables(spec: Spec, rows: list[table.Row]) -> str:
    """Write CSV, Markdown and plot, each whole or not at all; return their paths."""
    from titanplans.cli.sweep import plot  # Pillow

    paths = [spec.folder / name for name in (table.CSV, table.MARKDOWN, table.PLOT)]
    parts = [path.with_name(f"part-{path.name}") for path in paths]
    parts[0].write_text(table.csv_table(rows), encoding="utf-8")
    parts[1].write_text(table.markdown_table(spec, rows), encoding="utf-8")
    plot.draw(spec.path, rows, parts[2])
    for part, path in zip(parts, paths, strict=True):
        part.replace(path)
    return ", ".join(map(str, paths))
