"""What cells measured, and the table of a sweep: one list of columns, written as CSV and as Markdown.

Every cell has a row. A missing figure is an empty field; its reason is in the CSV's last column and below the Markdown
table. Figures are read from a run's metrics.jsonl and parallelism.json.
"""

import csv
import io
import json
import math
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from titanplans.cli.sweep.cells import Cell, show_or_unset
from titanplans.cli.sweep.spec import Spec
from titanplans.disk import write_whole
from titanplans.training.trainer.jsonl import FILE_NAME, read_rows

PARALLELISM = "parallelism.json"
LOSS = "loss_metrics/global_avg_loss"
VALIDATION_LOSS = "validation_metrics/loss"
TOKENS = "throughput/all_devices(tps)"
# What an accelerator's allocator reserved, or on a CPU the resident set; of validations, too.
_MEMORY = [
    prefix + name
    for prefix in ("", "validation_metrics/")
    for name in ("memory/max_reserved(GiB)", "memory/peak_rss(GiB)")
]
_DATA = re.compile(
    r"debug\.seed|model\.hf_assets_path|training\.(local_batch_size|global_batch_size|gradient_accumulation_steps|seq_len|"
    r"dataset.*|text_column)"
)
"""Keys that decide which tokens each step reads."""


class Figure(NamedTuple):
    """A figure's name in the CSV and in cell.json, and how Markdown shows it."""

    name: str
    title: str
    format: str
    scale: float = 1.0


FIGURES = (
    Figure("ranks", "ranks", ",.0f"),
    Figure("loss_first", "first loss, nats/token", ".5f"),
    Figure("loss_last", "last loss, nats/token", ".5f"),
    Figure("loss_validation", "validation loss, nats/token", ".5f"),
    Figure("tokens_per_second", "tokens/s", ",.0f"),
    Figure("peak_memory_gib", "peak memory, GiB", ".2f"),
    Figure("collectives_per_step", "collectives a step", ",.0f"),
    Figure("bytes_per_step", "received a step, MB", ",.2f", 1e-6),
)

Figures = dict[str, float | int | str]
"""By name: the number, or the reason why it is not known."""


def read_figures(folder: Path, skip_steps: int) -> Figures:
    """Return the figures of a run that ended with status 0, by its dump_folder.

    tokens/s is the median over the logged intervals that begin after `skip_steps`.
    """
    report = json.loads((folder / PARALLELISM).read_text()) if (folder / PARALLELISM).is_file() else {}
    none = f"{PARALLELISM} does not say" if report else f"the run wrote no {PARALLELISM}"
    step, why = report.get("step") or {}, report.get("reasons", {}).get("step", none)
    found = {"ranks": report.get("world_size") or none}
    found |= {f"{name}_per_step": step.get(name, why) for name in ("collectives", "bytes")}
    # Of rank 0 alone, or of each rank.
    files = [
        file for file in (folder / FILE_NAME, *sorted(folder.glob(f"rank_*/{FILE_NAME}"))) if file.is_file()
    ]
    if not files:
        return found | dict.fromkeys(
            (figure.name for figure in FIGURES[1:6]), f"the run wrote no {FILE_NAME}"
        )
    rows = read_rows(files[0])
    steps = [row for row in rows if LOSS in row]
    validations = [row for row in rows if VALIDATION_LOSS in row]
    begins = [0, *(row["step"] for row in steps)]
    speeds = [row[TOKENS] for begin, row in zip(begins, steps, strict=False) if begin >= skip_steps]
    peaks = [
        row[key] for file in files for row in read_rows(file) for key in _MEMORY if row.get(key) is not None
    ]
    too_short = f"no interval was logged that begins after step {skip_steps}"
    return found | {
        "loss_first": _loss(steps[:1], LOSS, "no step was logged"),
        "loss_last": _loss(steps[-1:], LOSS, "no step was logged"),
        "loss_validation": _loss(validations[-1:], VALIDATION_LOSS, "validation.enable = false"),
        "tokens_per_second": statistics.median(speeds) if speeds else too_short,
        "peak_memory_gib": max(peaks, default="the run logged none"),
    }


def _loss(rows: list[dict[str, Any]], key: str, none: str) -> float | str:
    return none if not rows else "not finite" if rows[0][key] is None else rows[0][key]


def write_tables(spec: Spec, cells: list[Cell]) -> str:
    """Write table.csv and table.md; return their paths."""
    rows = table(cells)
    texts = {spec.folder / "table.csv": csv_table(rows), spec.folder / "table.md": markdown_table(spec, rows)}
    for path, text in texts.items():
        write_whole(path, text)
    return ", ".join(map(str, texts))


def table(cells: list[Cell]) -> list[dict[str, Any]]:
    """Return the row of each cell by column: its name, the keys that vary, its figures, how it ended and why."""
    given = dict.fromkeys(key for cell in cells for key in cell.settings)
    varied = [key for key in given if len({cell.settings.get(key, "") for cell in cells}) > 1]
    first = next((cell for cell in cells if cell.state == "finished"), None)
    return [_row(cell, varied, first) for cell in cells]


def _row(cell: Cell, varied: list[str], first: Cell | None) -> dict[str, Any]:
    """`first` is the first cell that finished, with which the others' losses are compared."""
    record: Any = {} if cell.state == "not run" else cell.record
    figures = {figure: record.get("figures", {}).get(figure.name) for figure in FIGURES}
    reasons = [f"no {figure.title}: {why}" for figure, why in figures.items() if isinstance(why, str)]
    if first is not None and cell.state == "finished" and (other := _other_data(record, first.record)):
        reasons.append(f"losses don't compare with {first.name}'s, which saw other data: {', '.join(other)}")
    return {
        "cell": cell.name,
        "state": cell.state,
        **{key: cell.settings.get(key, "") for key in varied},
        **{figure.name: None if isinstance(value, str) else value for figure, value in figures.items()},
        "seconds": record.get("seconds"),
        "exit_status": record.get("exit_status"),
        "reason": record.get("line") or "; ".join(reasons),
    }


def _other_data(own: Any, first: Any) -> list[str]:
    """Return how the data of a finished cell differ from another's: "training.seq_len = 7, not 2048"."""
    mine, theirs = (
        {key: value for key, value in record["job"].items() if _DATA.fullmatch(key)}
        for record in (own, first)
    )
    # Each has its own part of the data; a degree of -1 depends on the machine.
    mine["data-parallel ranks"], theirs["data-parallel ranks"] = _data_parallel(own), _data_parallel(first)
    return [
        f"{key} = {show_or_unset(value)}, not {show_or_unset(theirs.get(key))}"
        for key, value in mine.items()
        if value != theirs.get(key)
    ]


def _data_parallel(record: Any) -> int | None:
    ranks, axes = record["figures"].get("ranks"), ("tensor", "context", "pipeline")
    others = math.prod(record["job"][f"parallelism.{axis}_parallel_degree"] for axis in axes)
    return ranks // others if isinstance(ranks, int) else None


def csv_table(rows: list[dict[str, Any]]) -> str:
    """Return the table with every figure in full."""
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def markdown_table(spec: Spec, rows: list[dict[str, Any]]) -> str:
    """Return a page: what was run, the table with rounded figures, and below it the reasons."""
    states = Counter(row["state"] for row in rows)
    lines = [f"# {Path(spec.path).stem}", ""]
    if spec.header.description:
        lines += [spec.header.description, ""]
    lines += [
        f"`{spec.path}` over `{spec.header.base}`: {', '.join(f'{n} {state}' for state, n in states.items())}. "
        f"tokens/s: the median over the logged intervals that begin after step {spec.header.timing_skip_steps}.",
        "",
        _line(["cell", "state", *(figure.title for figure in FIGURES)]),
        _line(["---", "---", *["---:"] * len(FIGURES)]),
    ]
    notes: dict[str, list[str]] = {}
    for row in rows:
        lines.append(_line([row["cell"], row["state"], *shown(row).values()]))
        if row["reason"]:
            notes.setdefault(row["reason"], []).append(f"`{row['cell']}`")
    lines += [""] * bool(notes)
    lines += [f"- {', '.join(names)}: {reason}" for reason, names in notes.items()]
    return "\n".join(lines) + "\n"


def shown(figures: dict[str, Any]) -> dict[str, str]:
    """Return the figures by title, rounded; empty where there is none."""
    known = {figure: figures.get(figure.name) for figure in FIGURES}
    return {
        figure.title: format(value * figure.scale, figure.format) if isinstance(value, int | float) else ""
        for figure, value in known.items()
    }


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
