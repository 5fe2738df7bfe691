"""The table of a sweep, as CSV for programs and as Markdown for people, from the records of its cells.

Every cell of the sweep has a row, also one that was refused, failed, or has not run yet; a figure that is not there is
an empty cell, and the reason stands below the table (in the CSV, beside it).
"""

import csv
import io
from pathlib import Path
from typing import Any, NamedTuple

from titanplans.cli.sweep.cells import Cell
from titanplans.cli.sweep.figures import FIGURES, Figure, memory_ranks
from titanplans.cli.sweep.record import Record
from titanplans.cli.sweep.spec import Spec
from titanplans.config.values import show

CSV, MARKDOWN, PLOT = "table.csv", "table.md", "table.png"


class Row(NamedTuple):
    """A cell and what is known of it."""

    cell: Cell
    record: Record | None
    """None: not run, or not with these settings."""

    outdated: bool = False
    """There is a record, of other settings: its figures would not compare."""

    @property
    def state(self) -> str:
        """The record's, in words of the table."""
        if self.record is None:
            return "outdated" if self.outdated else "not run"
        return "interrupted" if self.record.state == "running" else self.record.state


def csv_table(rows: list[Row]) -> str:
    """Return the table with every figure in full, and what varies as columns of their own."""
    varied = varying_keys([row.cell for row in rows])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "cell",
            "state",
            "ranks",
            *varied,
            *(figure.name for figure in FIGURES),
            "seconds",
            "exit_status",
            "reason",
        ]
    )
    for row in rows:
        record = row.record
        figures = {} if record is None else record.figures
        numbers = ["" if figures.get(f.name) is None else figures[f.name] for f in FIGURES]
        ranks, *ended = [""] * 4
        if record is not None:
            told = (record.ranks, record.seconds, record.exit_status, _why(record))
            ranks, *ended = ["" if value is None else value for value in told]
        writer.writerow(
            [row.cell.name, row.state, ranks, *(_setting(row.cell, key) for key in varied), *numbers, *ended]
        )
    return out.getvalue()


def markdown_table(spec: Spec, rows: list[Row]) -> str:
    """Return a page: what was run, the table, and below it what is missing and why."""
    header = ["cell", "ranks", *(_title(figure) for figure in FIGURES)]
    lines = [f"# {Path(spec.path).stem}", ""]
    if spec.header.description:
        lines += [spec.header.description, ""]
    lines += [_told(spec, rows), "", _line(header), _line(["---", *["---:"] * (1 + len(FIGURES))])]
    for row in rows:
        cells = [number(row, figure) for figure in FIGURES]
        if row.state != "finished":
            cells[0] = row.state
        ranks = "" if row.record is None or row.record.ranks is None else str(row.record.ranks)
        lines.append(_line([row.cell.name, ranks, *cells]))
    notes = _notes(rows)
    return "\n".join(lines + ([""] if notes else []) + [f"- {note}" for note in notes]) + "\n"


def number(row: Row, figure: Figure) -> str:
    """Return a figure as it is shown; empty where there is none."""
    value = None if row.record is None else row.record.figures.get(figure.name)
    if value is None:
        return ""
    return format(value / 1e6 if figure.name == "bytes_per_step" else value, figure.format)


def varying_keys(cells: list[Cell]) -> list[str]:
    """Return the keys that are not alike in all cells, in the order of the file."""
    given = dict.fromkeys(key for cell in cells for key in cell.settings)
    return [key for key in given if len({_setting(cell, key) for cell in cells}) > 1]


def different_data(rows: list[Row]) -> list[str]:
    """Say of which finished cells the losses don't compare with the first one's, as they saw other data or seeds."""
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
    """Return what decides which tokens a step sees, and how they are ordered."""
    job, record = row.cell.job, row.record
    assert job is not None
    assert record is not None
    assert record.ranks is not None
    t, parallel = job.training, job.parallelism
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
        // (
            parallel.tensor_parallel_degree
            * parallel.context_parallel_degree
            * parallel.pipeline_parallel_degree
        ),
    }
    return {key: "unset" if value is None else show(value) for key, value in found.items()}


def _told(spec: Spec, rows: list[Row]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    finished = [row for row in rows if row.state == "finished"]
    ranks = memory_ranks(finished[0].cell.folder) if finished else "rank 0"
    skip = spec.header.timing_skip_steps
    return (
        f"`{spec.path}` over `{spec.header.base}`: {', '.join(f'{n} {state}' for state, n in counts.items())}. "
        f"tokens/s: of all ranks, the median over the logged intervals that begin after step {skip}. "
        f"Peak memory: {ranks}, what the allocator reserved, or on a CPU the process's resident set. "
        "A step's collectives, and what one rank receives by them, as the run counted them."
    )


def _notes(rows: list[Row]) -> list[str]:
    notes = []
    for row in rows:
        if row.outdated:
            notes.append(f"`{row.cell.name}` outdated: what was run had other settings")
        if row.record is not None and row.state != "finished":
            status = "" if row.record.exit_status is None else f" (exit status {row.record.exit_status})"
            line = f": {row.record.line}" if row.record.line else ""
            notes.append(f"`{row.cell.name}` {row.state}{status}{line}")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for name, reason in {} if row.record is None else row.record.missing.items():
            title = next(figure.title for figure in FIGURES if figure.name == name)
            reasons.setdefault(f"no {title}: {reason}", []).append(row.cell.name)
    for told, names in reasons.items():
        whose = (
            "all that finished"
            if len(names) == sum(row.state == "finished" for row in rows)
            else _code(names)
        )
        notes.append(f"{whose}: {told}")
    return notes + different_data(rows)


def _why(record: Record) -> str | None:
    missing = [f"{name}: {reason}" for name, reason in record.missing.items()]
    return "; ".join([record.line] if record.line else missing) or None


def _setting(cell: Cell, key: str) -> str:
    """Return what a cell has under a key, as written; empty where it has the base job's."""
    if key not in cell.settings:
        return ""
    value = cell.settings[key]
    return "none" if value is None else value if isinstance(value, str) else show(value)


def _title(figure: Figure) -> str:
    return f"{figure.title}, {figure.unit}" if figure.unit else figure.title


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
