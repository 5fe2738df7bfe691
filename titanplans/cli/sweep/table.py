"""The table of a sweep, as CSV and as Markdown, from the records of its cells.

Every cell of the sweep has a row, even if it was refused, failed or has not run yet. A missing figure is an empty field;
its reason stands below the Markdown table, and in the CSV's last column.
"""

import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from titanplans.cli.sweep.cells import Cell
from titanplans.cli.sweep.figures import FIGURES, Figure, memory_ranks
from titanplans.cli.sweep.record import Record, show_or_unset
from titanplans.cli.sweep.spec import Spec
from titanplans.config.values import show

CSV, MARKDOWN, PLOT = "table.csv", "table.md", "table.png"


class Row(NamedTuple):
    """A cell and its record."""

    cell: Cell
    record: Record | None
    """None: not run, or not with these settings."""

    outdated: bool = False
    """The record on disk has other settings, so its figures are not shown."""

    @property
    def state(self) -> str:
        """The record's state as the table names it."""
        if self.record is None:
            return "outdated" if self.outdated else "not run"
        return "interrupted" if self.record.state == "running" else self.record.state

    def figure(self, name: str) -> float | int | None:
        """Return a figure, None where there is none."""
        value = None if self.record is None else self.record.figures.get(name)
        return None if isinstance(value, str) else value

    def shown(self, figure: Figure) -> str:
        """Return a figure as it is shown; empty where there is none."""
        value = self.figure(figure.name)
        if value is None:
            return ""
        return format(value / 1e6 if figure.name == "bytes_per_step" else value, figure.format)

    @property
    def reasons(self) -> dict[str, str]:
        """Why a figure is not there, by its name."""
        figures = {} if self.record is None else self.record.figures
        return {name: value for name, value in figures.items() if isinstance(value, str)}


def csv_table(rows: list[Row]) -> str:
    """Return the table with every figure in full, and a column for each key that varies."""
    varied = varying_keys([row.cell for row in rows])
    names = [figure.name for figure in FIGURES]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["cell", "state", "ranks", *varied, *names, "seconds", "exit_status", "reason"])
    for row in rows:
        ranks = seconds = status = why = None
        if row.record is not None:
            ranks, seconds, status = row.record.ranks, row.record.seconds, row.record.exit_status
            why = row.record.line or "; ".join(f"{name}: {reason}" for name, reason in row.reasons.items())
        settings = [_setting(row.cell, key) for key in varied]
        figures = map(row.figure, names)
        writer.writerow([row.cell.name, row.state, ranks, *settings, *figures, seconds, status, why])
    return out.getvalue()


def markdown_table(spec: Spec, rows: list[Row]) -> str:
    """Return a page: what was run, the table, and below it the missing figures with their reasons."""
    titles = [f"{figure.title}, {figure.unit}".rstrip(", ") for figure in FIGURES]
    lines = [f"# {Path(spec.path).stem}", ""]
    if spec.header.description:
        lines += [spec.header.description, ""]
    lines += [_summary(spec, rows), "", _line(["cell", "ranks", *titles])]
    lines.append(_line(["---", *["---:"] * (1 + len(FIGURES))]))
    for row in rows:
        figures = [row.shown(figure) for figure in FIGURES]
        if row.state != "finished":
            figures[0] = row.state
        ranks = "" if row.record is None or row.record.ranks is None else str(row.record.ranks)
        lines.append(_line([row.cell.name, ranks, *figures]))
    notes = [f"- {note}" for note in _notes(rows)]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def varying_keys(cells: list[Cell]) -> list[str]:
    """Return the keys whose values differ between cells, in the order of the file."""
    given = dict.fromkeys(key for cell in cells for key in cell.settings)
    return [key for key in given if len({_setting(cell, key) for cell in cells}) > 1]


def different_data(rows: list[Row]) -> list[str]:
    """Return a note for each finished cell whose data or seed differs from the first one's: their losses don't compare."""
    finished = [row for row in rows if row.state == "finished"]
    told = []
    for row in finished[1:]:
        first, own = _data(finished[0]), _data(row)
        differing = [f"{key} = {own[key]}, not {first[key]}" for key in own if own[key] != first[key]]
        if differing:
            told.append(
                f"`{row.cell.name}` saw other data than `{finished[0].cell.name}`, so their losses don't compare: "
                + ", ".join(differing)
            )
    return told


def _data(row: Row) -> dict[str, str]:
    """Return the settings that decide which tokens each step reads."""
    job, record = row.cell.job, row.record
    assert job is not None
    assert record is not None
    assert record.ranks is not None
    t, p = job.training, job.parallelism
    found: dict[str, Any] = {
        "debug.seed": job.debug.seed,
        "model.hf_assets_path": job.model.hf_assets_path,
        "training.local_batch_size": t.local_batch_size,
        "training.global_batch_size": t.global_batch_size,
        "training.gradient_accumulation_steps": t.gradient_accumulation_steps,
        "training.seq_len": t.seq_len,
        "training.dataset": t.dataset,
        "training.dataset_path": t.dataset_path,
        "training.dataset_split": t.dataset_split,
        "training.text_column": t.text_column,
        # Each has its own part of the data; a degree of -1 depends on the machine.
        "data-parallel ranks": record.ranks
        // (p.tensor_parallel_degree * p.context_parallel_degree * p.pipeline_parallel_degree),
    }
    return {key: show_or_unset(value) for key, value in found.items()}


def _summary(spec: Spec, rows: list[Row]) -> str:
    states = Counter(row.state for row in rows)
    finished = [row for row in rows if row.state == "finished"]
    ranks = memory_ranks(finished[0].cell.folder) if finished else "rank 0"
    return (
        f"`{spec.path}` over `{spec.header.base}`: {', '.join(f'{n} {state}' for state, n in states.items())}. "
        "tokens/s: of all ranks, the median over the logged intervals that begin after step "
        f"{spec.header.timing_skip_steps}. "
        f"Peak memory: {ranks}, what the allocator reserved, or on a CPU the process's resident set. "
        "A step's collectives, and what one rank receives by them, as the run counted them."
    )


def _notes(rows: list[Row]) -> list[str]:
    notes = []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.outdated:
            notes.append(f"`{row.cell.name}` outdated: what was run had other settings")
        if row.record is not None and row.state != "finished":
            status = "" if row.record.exit_status is None else f" (exit status {row.record.exit_status})"
            line = f": {row.record.line}" if row.record.line else ""
            notes.append(f"`{row.cell.name}` {row.state}{status}{line}")
        for name, reason in row.reasons.items():
            title = next(figure.title for figure in FIGURES if figure.name == name)
            reasons.setdefault(f"no {title}: {reason}", []).append(f"`{row.cell.name}`")
    finished = sum(row.state == "finished" for row in rows)
    for reason, names in reasons.items():
        notes.append(f"{'all that finished' if len(names) == finished else ', '.join(names)}: {reason}")
    return notes + different_data(rows)


def _setting(cell: Cell, key: str) -> str:
    """Return a cell's own value of a key; empty where the base job's holds."""
    if key not in cell.settings:
        return ""
    value = cell.settings[key]
    return "none" if value is None else value if isinstance(value, str) else show(value)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
