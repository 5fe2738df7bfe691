"""The command line: read the sweep, run the cells that are not done, one process each, write the table after each.

    0          every cell finished or was refused, and one at least finished
    1          a cell failed or exceeded its time limit; the others have been run
    2          every cell was refused; or the sweep can't be run as written: one line says why, and nothing was run
    128 + N    stopped by signal N; the same command continues

A cell that has finished with the same settings is not run again. One that was refused, failed or was interrupted is run
again, and resumes from its checkpoint if its job writes any. If the settings of a cell that has finished or holds a
checkpoint have changed, the sweep is refused; --rerun deletes what such cells wrote.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

from titanplans.cli.sweep.cells import Cell, make_cells, refusal
from titanplans.cli.sweep.spec import Spec, read_spec
from titanplans.cli.sweep.table import read_figures, shown, write_tables
from titanplans.config import ConfigError
from titanplans.errors import UserError
from titanplans.lock import locked_folder
from titanplans.training.launch.logs import init_logging
from titanplans.training.launch.orphans import end_with_parent
from titanplans.training.launch.signals import Stopped, stop_on_signals

LOG = "log.txt"
TRAIN = [sys.executable, "-m", "titanplans", "train"]
"""What a cell's arguments are appended to."""

# A job ends within some 10 s of a signal (training/launch/); then it is killed.
_SECONDS_TO_STOP = 20.0


def run_cell(cell: Cell, time_limit: float | None) -> dict[str, Any]:
    """Run the cell's job, and wait until all its processes have ended. It is killed if the sweep is.

    Returns:
        `state`, `exit_status` (negative: the signal that killed it), `line` and `seconds` of the cell's record.

    Raises:
        Stopped: a signal stopped the sweep, and the job with it.
    """
    start, path = time.perf_counter(), cell.folder / LOG
    with path.open("a") as log:
        offset = log.tell()
        process = subprocess.Popen(
            [*TRAIN, *cell.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=partial(end_with_parent, os.getpid()),
            start_new_session=True,  # Ctrl-C on the terminal reaches the sweep, and the job once, through it
        )
    try:
        with stop_on_signals():
            status = process.wait(timeout=time_limit)
        state = {0: "finished", 2: "refused"}.get(status, "failed")
        text = path.read_bytes()[offset:].decode(errors="replace")
        line = None if status == 0 else error_line(text, status)
    except subprocess.TimeoutExpired:
        status = _stop(process, signal.SIGTERM)
        state, line = "failed", f"stopped at [sweep] time_limit_seconds = {time_limit:g}"
    except Stopped:
        _stop(process, signal.SIGINT)
        raise
    seconds = round(time.perf_counter() - start, 1)
    return {"state": state, "exit_status": status, "line": line, "seconds": seconds}


def _stop(process: subprocess.Popen, signum: int) -> int:
    """Send the signal, which the job hands on to its ranks; kill all of them if that does not end it."""
    try:
        process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_SECONDS_TO_STOP)
    finally:  # after a second Ctrl-C, too; if the job ended in order, its session is empty
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def error_line(text: str, status: int) -> str:
    """Return why a job with this output and exit status ended: the signal that killed it, or its last error line."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1]


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
    with contextlib.nullcontext() if arguments.dry_run else locked_folder(spec.folder, where):
        for cell in cells:
            cell.read()
        if arguments.dry_run:
            return _dry_run(chosen)
        return _run(spec, cells, chosen, arguments.rerun)


def _dry_run(cells: list[Cell]) -> int:
    with contextlib.redirect_stdout(sys.stderr):
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
