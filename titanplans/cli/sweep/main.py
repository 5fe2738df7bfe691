"""The command line: read the sweep, run the cells that are not done, write the table after each.

    0          every cell finished or was refused, and one at least finished
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
from contextlib import nullcontext, redirect_stdout

from titanplans.cli.sweep.cells import Cell, make_cells, refusal
from titanplans.cli.sweep.process import LOG, run_cell
from titanplans.cli.sweep.spec import Spec, read_spec
from titanplans.cli.sweep.table import read_figures, shown, write_tables
from titanplans.config import ConfigError
from titanplans.errors import UserError
from titanplans.lock import locked_folder
from titanplans.training.launch.logs import init_logging
from titanplans.training.launch.signals import Stopped


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="titanplans sweep",
        description="Run a grid of jobs, one after another, and write a table of their results.",
        allow_abbrev=False,
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
    """Run the sweep that `argv` names; return the exit status, or raise a UserError."""
    arguments = parser().parse_args(argv)
    if "RANK" in os.environ:
        raise UserError("a sweep starts its jobs itself, on this machine; run it without torchrun")
    spec = read_spec(arguments.sweep)
    cells = make_cells(spec)
    names = [cell.name for cell in cells]
    for name in arguments.only:
        if name not in names:
            raise ConfigError(f"--only {name}: {spec.path} has no such cell; there are {', '.join(names)}")
    chosen = [cell for cell in cells if not arguments.only or cell.name in arguments.only]
    where = f"[sweep] dump_folder: {spec.folder}"
    with nullcontext() if arguments.dry_run else locked_folder(spec.folder, where):
        for cell in cells:
            cell.read()
        if arguments.dry_run:
            return _dry_run(chosen)
        return _run(spec, cells, chosen, arguments.rerun)


def _dry_run(cells: list[Cell]) -> int:
    with redirect_stdout(sys.stderr):
        init_logging(0)  # what libraries say when they are imported
    for cell in cells:
        print(f"{cell.name}: {cell.kept() or cell.state}\n  {cell.command}")
        if (why := refusal(cell)) is not None:
            print(f"  would be refused: {why}")
    return 0


def _run(spec: Spec, cells: list[Cell], chosen: list[Cell], rerun: str | None) -> int:
    for cell in chosen:
        if rerun is None and (kept := cell.kept()):
            raise ConfigError(
                f"{spec.path}: cell {cell.name} {kept}: --rerun changed runs such cells again and deletes what they wrote, "
                "[sweep] dump_folder can name a new folder"
            )
    for cell in chosen:
        if cell.changes() or (rerun == "all" and cell.state == "finished"):
            # All before the first runs: if this sweep is killed, no table mixes its figures with earlier ones.
            shutil.rmtree(cell.folder)
            cell.record = None
    for number, cell in enumerate(chosen, 1):
        _run_one(spec, cells, cell, f"[{number}/{len(chosen)}] {cell.name}")
    print(write_tables(spec, cells))
    states = {cell.state for cell in chosen}
    return 2 if states == {"refused"} else int("failed" in states)


def _run_one(spec: Spec, cells: list[Cell], cell: Cell, place: str) -> None:
    """Run one cell into its record, unless it has finished, and write the table."""
    if cell.state == "finished":
        cell.update(figures=read_figures(cell.folder, spec.header.timing_skip_steps))
        print(f"{place}: finished before", flush=True)
        return
    cell.begin()
    if cell.refusal is not None:
        ended = {"state": "refused", "exit_status": 2, "line": cell.refusal, "seconds": 0.0}
    else:
        print(f"{place}: runs, {cell.folder / LOG}", flush=True)
        try:
            ended = run_cell(cell, spec.header.time_limit_seconds)
        except Stopped:
            print(f"stopped; {write_tables(spec, cells)}; the same command goes on", flush=True)
            raise
    figures = read_figures(cell.folder, spec.header.timing_skip_steps) if ended["state"] == "finished" else {}
    cell.update(**ended, figures=figures)
    write_tables(spec, cells)
    said = ended["line"] or "; ".join(f"{title} {text}" for title, text in shown(figures).items() if text)
    print(f"{place}: {ended['state']} after {ended['seconds']:.0f} s: {said}", flush=True)
