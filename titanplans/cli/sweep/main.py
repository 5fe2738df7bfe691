"""The command line: read the sweep, run the cells that are not done, write the table after each.

    0          every cell finished or was refused, not all the latter
    1          a cell failed or exceeded its time limit; the others have been run
    2          every cell was refused; or the sweep can't be run as written: one line says why, and nothing was run
    128 + N    stopped by signal N; the same command continues

A cell that has finished with the same settings is not run again. One that was refused, failed or was interrupted is run
again, and resumes from its checkpoint if its job writes any. If the settings of a cell that has finished or holds a
checkpoint have changed, the sweep is refused; --rerun deletes what such cells wrote.
"""

import argparse
import os
import shutil
import sys
from contextlib import redirect_stdout
from typing import NoReturn

from titanplans.cli.sweep.cells import Cell, make_cells, refusal
from titanplans.cli.sweep.process import LOG, only_sweep, run_cell
from titanplans.cli.sweep.spec import Spec, read_spec
from titanplans.cli.sweep.table import read_figures, shown, write_tables
from titanplans.config import ConfigError
from titanplans.errors import UserError, as_line
from titanplans.training.launch.logs import init_logging
from titanplans.training.launch.signals import Stopped


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see titanplans sweep --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options, whose refusals are ConfigErrors."""
    parser = _Parser(
        prog="titanplans sweep",
        description="Run a grid of jobs, one after another, and write a table of their results.",
    )
    parser.add_argument("sweep", metavar="SWEEP.toml", help="which jobs (docs/training.md)")
    dry = "list the cells, and what would be refused; start nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    only = "run this cell only; may be given several times"
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help=only)
    rerun = (
        "run finished cells again, whose settings have changed, or all of them; what they wrote is deleted"
    )
    parser.add_argument("--rerun", choices=("changed", "all"), help=rerun)
    return parser


def main(argv: list[str]) -> int:
    """Run the sweep that `argv` names; return the exit status."""
    try:
        arguments = parser().parse_args(argv)
        if "RANK" in os.environ:
            raise UserError("a sweep starts its jobs itself, on this machine; run it without torchrun")
        spec = read_spec(arguments.sweep)
        cells = {cell.name: cell for cell in make_cells(spec)}
        for name in arguments.only:
            if name not in cells:
                raise ConfigError(
                    f"--only {name}: {spec.path} has no such cell; there are {', '.join(cells)}"
                )
        chosen = [cell for cell in cells.values() if not arguments.only or cell.name in arguments.only]
        if arguments.dry_run:
            return _dry_run(chosen, arguments.rerun)
        with only_sweep(spec.folder) as lock:
            return _run(spec, list(cells.values()), chosen, arguments.rerun, lock)
    except UserError as error:
        print(f"error: {as_line(str(error))}", file=sys.stderr)
        return 2


def _dry_run(cells: list[Cell], rerun: str | None) -> int:
    with redirect_stdout(sys.stderr):
        init_logging(0)  # what libraries say when they are imported
    for cell in cells:
        cell.read()
        plan = "to run" if cell.record is None else f"to run again ({cell.record['state']} before)"
        if rerun is None and (kept := cell.kept()):
            plan = kept
        elif cell.state == "finished" and rerun != "all":
            plan = "finished"
        print(f"{cell.name}: {plan}\n  {cell.command}")
        if (why := refusal(cell)) is not None:
            print(f"  would be refused: {why}")
    return 0


def _run(spec: Spec, cells: list[Cell], chosen: list[Cell], rerun: str | None, lock: int) -> int:
    for cell in cells:
        cell.read()
    for cell in chosen:
        if rerun is None and (kept := cell.kept()):
            raise ConfigError(
                f"{spec.path}: cell {cell.name} {kept}: --rerun changed runs such cells again and deletes what they wrote, "
                "[sweep] dump_folder can name a new folder"
            )
    for cell in chosen:
        if cell.state == "outdated" or (rerun == "all" and cell.state == "finished"):
            # All before the first runs: if this sweep is killed, no table mixes its figures with earlier ones.
            shutil.rmtree(cell.folder)
            cell.record = None
    for cell in chosen:
        place = f"[{cells.index(cell) + 1}/{len(cells)}] {cell.name}"
        if cell.state == "finished":
            cell.update(figures=read_figures(cell.folder, spec.header.timing_skip_steps))
            print(f"{place}: finished before", flush=True)
            continue
        signum = _run_one(spec, cell, lock, place)
        tables = write_tables(spec, cells)
        if signum is not None:
            print(f"stopped; {tables}; the same command goes on", flush=True)
            raise Stopped(signum)
    print(write_tables(spec, cells))
    states = {cell.state for cell in chosen}
    return 2 if states == {"refused"} else int(bool(states & {"failed", "timed out"}))


def _run_one(spec: Spec, cell: Cell, lock: int, place: str) -> int | None:
    """Run one cell into its record; return the signal that stopped the sweep, or None."""
    cell.begin()
    if cell.refusal is not None:
        cell.update(state="refused", exit_status=2, line=cell.refusal)
        print(f"{place}: refused: {cell.refusal}", flush=True)
        return None
    print(f"{place}: runs, {cell.folder / LOG}", flush=True)
    ended, signum = run_cell(cell, lock, spec.header.time_limit_seconds)
    figures = read_figures(cell.folder, spec.header.timing_skip_steps) if ended["state"] == "finished" else {}
    cell.update(**ended, figures=figures)
    said = ended["line"] or "; ".join(f"{title} {text}" for title, text in shown(figures).items() if text)
    print(f"{place}: {ended['state']} after {ended['seconds']:.0f} s: {said}", flush=True)
    return signum
