"""What a finished cell measured: read from its metrics.jsonl and parallelism.json, never from what it printed.

A figure that is not there is None, and `missing` says why: it is not a 0.
"""

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
_MEMORY = ("memory/max_reserved(GiB)", "memory/peak_rss(GiB)")


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

_Found = dict[str, float | int | None]


def read_figures(folder: Path, skip_steps: int) -> tuple[_Found, dict[str, str]]:
    """Return the figures of a run that ended with status 0, and why those are missing that are None.

    Args:
        folder: its dump_folder.
        skip_steps: tokens/s is the median over the logged intervals that begin after this step.
    """
    found: _Found = dict.fromkeys((figure.name for figure in FIGURES), None)
    missing: dict[str, str] = {}
    _from_metrics(folder, skip_steps, found, missing)
    _from_parallelism(folder / PARALLELISM, found, missing)
    return found, missing


def _from_metrics(folder: Path, skip_steps: int, found: _Found, missing: dict[str, str]) -> None:
    ranks = _metrics_files(folder)
    if not ranks:
        for figure in FIGURES[:5]:
            missing[figure.name] = f"the run wrote no {FILE_NAME}"
        return
    of_ranks = [read_rows(path) for path in ranks]
    rows = of_ranks[0]
    steps = [row for row in rows if _LOSS in row]
    validations = [row for row in rows if _VALIDATION_LOSS in row]
    for name, wanted, key, index in (
        ("loss_first", steps, _LOSS, 0),
        ("loss_last", steps, _LOSS, -1),
        ("loss_validation", validations, _VALIDATION_LOSS, -1),
    ):
        found[name] = wanted[index][key] if wanted else None
        if found[name] is None:
            none = "validation.enable = false" if wanted is validations else "no step was logged"
            missing[name] = "not finite" if wanted else none

    speeds = [
        row[_TOKENS]
        for before, row in zip([{"step": 0}, *steps], steps, strict=False)
        if before["step"] >= skip_steps
    ]
    if speeds:
        found["tokens_per_second"] = statistics.median(speeds)
    else:
        missing["tokens_per_second"] = f"no interval was logged that begins after step {skip_steps}"

    peaks = [peak for rows in of_ranks for row in rows for peak in _peaks(row)]
    if peaks:
        found["peak_memory_gib"] = max(peaks)
    else:
        missing["peak_memory_gib"] = "the run logged none"


def memory_ranks(folder: Path) -> str:
    """Say of which ranks the peak memory is known: "rank 0", or "the largest of N ranks"."""
    count = len(_metrics_files(folder))
    return "rank 0" if count <= 1 else f"the largest of {count} ranks"


def _metrics_files(folder: Path) -> list[Path]:
    """Return the files of the ranks that wrote one, rank 0's first."""
    ranks = sorted(
        folder.glob(f"rank_*/{FILE_NAME}"), key=lambda path: int(path.parent.name.removeprefix("rank_"))
    )
    alone = folder / FILE_NAME
    return [alone] if alone.is_file() else ranks


def _peaks(row: dict[str, Any]) -> list[float]:
    prefixes = ("", "validation_metrics/")
    values = [row.get(prefix + key) for prefix in prefixes for key in _MEMORY]
    return [value for value in values if value is not None]


def _from_parallelism(path: Path, found: _Found, missing: dict[str, str]) -> None:
    names = {"collectives_per_step": "collectives", "bytes_per_step": "bytes"}
    if not path.is_file():
        missing |= dict.fromkeys(names, f"the run wrote no {PARALLELISM}")
        return
    step = json.loads(path.read_text(encoding="utf-8")).get("step") or {}
    for name, key in names.items():
        found[name] = step.get(key)
        if found[name] is None:
            missing[name] = step.get("reason") or f"{PARALLELISM} has no step.{key}"
