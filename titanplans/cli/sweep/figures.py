"""The figures of a finished cell, from its metrics.jsonl and parallelism.json; its printed output is not parsed."""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from titanplans.training.jsonl import FILE_NAME, read_rows

PARALLELISM = "parallelism.json"
_LOSS = "loss_metrics/global_avg_loss"
_VALIDATION_LOSS = "validation_metrics/loss"
_TOKENS = "throughput/all_devices(tps)"
# What an accelerator's allocator reserved, or on a CPU the resident set; of validations, too.
_MEMORY = [
    prefix + name
    for prefix in ("", "validation_metrics/")
    for name in ("memory/max_reserved(GiB)", "memory/peak_rss(GiB)")
]


class Figure(NamedTuple):
    """One column of the table."""

    name: str
    title: str
    unit: str
    format: str


FIGURES = (
    Figure("loss_first", "first loss", "nats/token", ".5f"),
    Figure("loss_last", "last loss", "nats/token", ".5f"),
    Figure("loss_validation", "validation loss", "nats/token", ".5f"),
    Figure("tokens_per_second", "tokens/s", "", ",.0f"),
    Figure("peak_memory_gib", "peak memory", "GiB", ".2f"),
    Figure("collectives_per_step", "collectives a step", "", ",.0f"),
    Figure("bytes_per_step", "received a step", "MB", ",.2f"),
)
"""bytes_per_step is in bytes, and shown in MB (10^6)."""

Figures = dict[str, float | int | str]
"""By name: the number, or the reason why it is not known."""


def read_figures(folder: Path, skip_steps: int) -> Figures:
    """Return the figures of a run that ended with status 0.

    Args:
        folder: its dump_folder.
        skip_steps: tokens/s is the median over the logged intervals that begin after this step.
    """
    ranks = [read_rows(path) for path in _metrics_files(folder)]
    return _from_metrics(ranks, skip_steps) | _from_parallelism(folder / PARALLELISM)


def memory_ranks(folder: Path) -> str:
    """Return whose peak memory it is: "rank 0", or "the largest of N ranks"."""
    count = len(_metrics_files(folder))
    return "rank 0" if count <= 1 else f"the largest of {count} ranks"


def _metrics_files(folder: Path) -> list[Path]:
    """Return the files of the ranks that wrote one, rank 0's first."""
    alone = folder / FILE_NAME
    if alone.is_file():
        return [alone]
    return sorted(folder.glob(f"rank_*/{FILE_NAME}"), key=lambda path: int(path.parent.name[len("rank_") :]))


def _from_metrics(ranks: list[list[dict[str, Any]]], skip_steps: int) -> Figures:
    if not ranks:
        return dict.fromkeys((figure.name for figure in FIGURES[:5]), f"the run wrote no {FILE_NAME}")
    steps = [row for row in ranks[0] if _LOSS in row]
    validations = [row for row in ranks[0] if _VALIDATION_LOSS in row]
    begins = [0, *(row["step"] for row in steps)]
    speeds = [row[_TOKENS] for begin, row in zip(begins, steps, strict=False) if begin >= skip_steps]
    peaks = [row[key] for rows in ranks for row in rows for key in _MEMORY if row.get(key) is not None]
    return {
        "loss_first": _loss(steps[:1], _LOSS, "no step was logged"),
        "loss_last": _loss(steps[-1:], _LOSS, "no step was logged"),
        "loss_validation": _loss(validations[-1:], _VALIDATION_LOSS, "validation.enable = false"),
        "tokens_per_second": statistics.median(speeds)
        if speeds
        else f"no interval was logged that begins after step {skip_steps}",
        "peak_memory_gib": max(peaks) if peaks else "the run logged none",
    }


def _loss(rows: list[dict[str, Any]], key: str, none: str) -> float | str:
    if not rows:
        return none
    return "not finite" if rows[0][key] is None else rows[0][key]


def _from_parallelism(path: Path) -> Figures:
    found = {"collectives_per_step": "collectives", "bytes_per_step": "bytes"}
    if not path.is_file():
        return dict.fromkeys(found, f"the run wrote no {PARALLELISM}")
    report = json.loads(path.read_text(encoding="utf-8"))
    step = report.get("step") or {}
    why = report.get("reasons", {}).get("step") or f"{PARALLELISM} does not say"
    return {name: why if step.get(key) is None else step[key] for name, key in found.items()}
