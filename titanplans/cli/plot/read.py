"""What is drawn: the curves of runs, over their steps, and the bars of a sweep's table, as they were logged."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from titanplans.cli.sweep.table import FIGURES, LOSS, TOKENS, VALIDATION_LOSS
from titanplans.errors import ConfigError
from titanplans.text import some
from titanplans.training.trainer.jsonl import FILE_NAME, read_rows

TABLE = "table.csv"
_PANELS = {
    "loss, nats/token": (LOSS, VALIDATION_LOSS),
    "norm of the gradient": ("grad_norm",),
    "tokens/s": (TOKENS,),
}
"""What is drawn of a run: panels, each with the figures of metrics.jsonl in it."""


class Curve(NamedTuple):
    """A figure of a run over its steps, as it was logged."""

    run: int
    """Which of the runs, from 0: one colour in all panels."""
    validation: bool
    steps: list[int]
    values: list[float]


@dataclass
class Panel:
    """One system of axes: curves over steps, or a bar for each cell."""

    title: str
    curves: dict[str, Curve] = field(default_factory=dict)
    """By the run's name."""
    bars: dict[str, float] = field(default_factory=dict)
    """By the cell's name and the figure as the table shows it."""
    base: float = 0.0
    """Where bars begin."""


def read(paths: Sequence[str]) -> tuple[list[Panel], list[str]]:
    """Return what to draw of some runs, or of one sweep, and a line for each thing that can't be drawn.

    Args:
        paths: a run's dump_folder or its metrics.jsonl, several of them; or the folder or the table.csv of a sweep.

    Raises:
        ConfigError: no metrics or table is there, a file is damaged, or nothing in it can be drawn.
    """
    tables = [path for path in paths if _table(path).is_file()]
    if tables and len(paths) > 1:
        raise ConfigError(
            f"plot {' '.join(paths)}: {tables[0]} is a sweep, which is drawn alone; for the curves of its cells name their "
            "folders"
        )
    panels, notes = _sweep(_table(tables[0])) if tables else _runs(paths)
    if not panels:
        raise ConfigError(f"plot {' '.join(paths)}: no figure is logged there yet")
    return panels, notes


def _table(path: str) -> Path:
    return Path(path) if Path(path).name == TABLE else Path(path) / TABLE


def _runs(paths: Sequence[str]) -> tuple[list[Panel], list[str]]:
    panels, notes = [Panel(title) for title in _PANELS], []
    for run, (name, path) in enumerate(_named(paths).items()):
        rows = read_rows(_metrics(path))
        for panel, keys in zip(panels, _PANELS.values(), strict=True):
            for key in keys:
                validation = key == VALIDATION_LOSS
                what = f"{name}, validation" if validation else name
                logged = [row for row in rows if key in row]
                known = [row for row in logged if row[key] is not None]
                if known:
                    steps, values = [row["step"] for row in known], [row[key] for row in known]
                    panel.curves[what] = Curve(run, validation, steps, values)
                if lost := [str(row["step"]) for row in logged if row[key] is None]:
                    notes.append(f"{what}: {panel.title} is not finite at step {some(lost)}")
    return [panel for panel in panels if panel.curves], notes


def _metrics(path: str) -> Path:
    """Return a run's file of metrics; of runs that have one for each rank, rank 0's."""
    for file in (Path(path), Path(path) / FILE_NAME, Path(path) / "rank_0" / FILE_NAME):
        if file.is_file():
            return file
    if not Path(path).exists():
        raise ConfigError(f"plot {path}: there is no such folder or file")
    raise ConfigError(
        f"plot {path}: there is no {FILE_NAME} in it, which a job writes with --metrics.enable_jsonl; name such a "
        "job's job.dump_folder"
    )


def _named(paths: Sequence[str]) -> dict[str, str]:
    """Return the paths by names as short as tells them apart: the folder's own, or the path."""
    folders = [Path(path).parent if Path(path).name == FILE_NAME else Path(path) for path in paths]
    own = [folder.resolve().name for folder in folders]
    short = len(set(own)) == len(own)
    return dict(zip(own if short else map(str, folders), paths, strict=True))


def _sweep(table: Path) -> tuple[list[Panel], list[str]]:
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"cell", "state", *(figure.name for figure in FIGURES)} <= rows[0].keys():
        raise ConfigError(f"{table} is not the table of a sweep; titanplans sweep writes it anew")
    panels = []
    for figure in FIGURES:
        known = {row["cell"]: float(row[figure.name]) * figure.scale for row in rows if row[figure.name]}
        bars = {f"{cell}  {value:{figure.format}}": value for cell, value in known.items()}
        # Losses differ by little of their size, and none of them is near 0.
        low, high = min(known.values(), default=0.0), max(known.values(), default=0.0)
        base = low - (high - low) / 4 if figure.name.startswith("loss") and high > low else 0.0
        title = f"{figure.title}; bars begin at {base:{figure.format}}" if base else figure.title
        panels.append(Panel(title, bars=bars, base=base))
    notes = [f"{row['cell']}: {row['state']}" for row in rows if row["state"] != "finished"]
    return [panel for panel in panels if panel.bars], notes
