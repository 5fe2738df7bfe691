"""`titanplans plot`: losses, norms and tokens/s of runs, or a sweep's table, in the terminal or as a picture.

Terminals are drawn by plotext, pictures by matplotlib, which is installed on request. Exit status: 0 drawn, 2 nothing
is there to draw, or it can't be drawn as asked.
"""

import argparse
import csv
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from titanplans.cli.sweep.table import FIGURES, LOSS, TOKENS, VALIDATION_LOSS
from titanplans.disk import naming
from titanplans.errors import ConfigError
from titanplans.text import some
from titanplans.training.trainer.jsonl import FILE_NAME, read_rows

TABLE = "table.csv"
FORMATS = (".png", ".svg", ".pdf")
_PANELS = {
    "loss, nats/token": (LOSS, VALIDATION_LOSS),
    "norm of the gradient": ("grad_norm",),
    "tokens/s": (TOKENS,),
}
"""What is drawn of a run: panels, each with the figures of metrics.jsonl in it."""
_MARKERS = ("*o", "+x", "#@", "%&", "=~")
"""Characters of each run's curves in a terminal, the second for its validation."""
_COLORS = ("blue", "orange", "green", "red", "magenta")


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


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="titanplans plot",
        description="Draw losses, norms of the gradient and tokens/s of runs over their steps, as they were logged with "
        "--metrics.enable_jsonl, or the table of one sweep.",
        epilog="exit status: 0 drawn, 2 nothing is there to draw, or it can't be drawn as asked",
        allow_abbrev=False,
    )
    words = "a job's dump_folder; or one sweep's folder, alone"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=words)
    words = "a picture, .png, .svg or .pdf, instead of the terminal; pip install '.[plot]' in a clone"
    parser.add_argument("--output", type=Path, metavar="FILE", help=words)
    return parser


def main(argv: list[str]) -> int:
    """Draw what `argv` names; return the exit status, or raise a UserError."""
    arguments = parser().parse_args(argv)
    if arguments.output is not None:
        _check_output(arguments.output)
    panels, notes = read(arguments.runs)
    if arguments.output is None:
        colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(draw(panels, width=shutil.get_terminal_size((100, 24)).columns, colors=colors))
    else:
        with naming(arguments.output):
            write(panels, arguments.output)
        print(arguments.output)
    print("".join(f"{note}\n" for note in notes), end="")
    return 0


def _check_output(path: Path) -> None:
    """Refuse a picture that can't be drawn here."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"plot --output {path}: a picture's name ends with {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"plot --output {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"plot --output {path}: matplotlib is not installed; pip install '.[plot]' in a clone, or leave --output out to "
            "draw in the terminal"
        )


def read(folders: Sequence[str]) -> tuple[list[Panel], list[str]]:
    """Return what to draw of the dump_folders of runs or of one sweep's folder, and a line for each thing that can't be.

    Raises:
        ConfigError: no metrics or table is there, a file is damaged, or nothing in it can be drawn.
    """
    tables = [table for folder in folders if (table := Path(folder) / TABLE).is_file()]
    if tables and len(folders) > 1:
        raise ConfigError(
            f"plot {' '.join(folders)}: {tables[0].parent} is a sweep, which is drawn alone; for the curves of its cells "
            "name their folders"
        )
    panels, notes = _sweep(tables[0]) if tables else _runs(folders)
    if not panels:
        raise ConfigError(f"plot {' '.join(folders)}: no figure is logged there yet")
    return panels, notes


def _runs(folders: Sequence[str]) -> tuple[list[Panel], list[str]]:
    panels, notes = [Panel(title) for title in _PANELS], []
    for run, folder in enumerate(folders):
        rows = read_rows(_metrics(Path(folder)))
        for panel, keys in zip(panels, _PANELS.values(), strict=True):
            for key in keys:
                validation = key == VALIDATION_LOSS
                what = f"{folder}, validation" if validation else folder
                known = {row["step"]: row[key] for row in rows if row.get(key) is not None}
                if known:
                    panel.curves[what] = Curve(run, validation, list(known), list(known.values()))
                if lost := [str(row["step"]) for row in rows if key in row and row[key] is None]:
                    notes.append(f"{what}: {panel.title} is not finite at step {some(lost)}")
    return [panel for panel in panels if panel.curves], notes


def _metrics(folder: Path) -> Path:
    """Return a run's file of metrics; of runs that have one for each rank, rank 0's."""
    for file in (folder / FILE_NAME, folder / "rank_0" / FILE_NAME):
        if file.is_file():
            return file
    raise ConfigError(
        f"plot {folder}: there is no {FILE_NAME}, which a job writes with --metrics.enable_jsonl; name such a job's "
        "job.dump_folder"
    )


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


def draw(panels: Sequence[Panel], *, width: int, colors: bool) -> str:
    """Return `panels`, one below the other, as lines of `width` characters."""
    import plotext

    def marker(curve: Curve) -> str:
        return _MARKERS[curve.run % len(_MARKERS)][curve.validation]

    legend = {marker(curve): name for panel in panels for name, curve in panel.curves.items()}
    lines = [f"{character} {name}" for character, name in legend.items()]
    for panel in panels:
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plotsize(width, len(panel.bars) + 4 if panel.bars else 16)
        plotext.title(panel.title)
        if panel.bars:
            names, values = list(panel.bars)[::-1], list(panel.bars.values())[::-1]  # the first on top
            plotext.bar(names, values, orientation="horizontal", width=0.01, minimum=panel.base)
        for curve in panel.curves.values():
            color = _COLORS[curve.run % len(_COLORS)]
            plotext.plot(curve.steps, curve.values, marker=marker(curve), color=color)
        if steps := [step for curve in panel.curves.values() for step in curve.steps]:
            first, last = min(steps), max(steps)
            plotext.xticks(sorted({first + (last - first) * part // 5 for part in range(6)}))
        lines.append(plotext.build())
    return "\n".join(lines if colors else map(plotext.uncolorize, lines))


def write(panels: Sequence[Panel], path: Path) -> None:
    """Write `panels`, one below the other, as a picture."""
    size = (9, 3.2 * len(panels))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    for panel, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
        axes.set_title(panel.title)
        if panel.bars:
            axes.barh(list(panel.bars), list(panel.bars.values()))
            axes.invert_yaxis()  # the first cell on top
            axes.set_xlim(left=panel.base)
        for name, curve in panel.curves.items():
            style = "--" if curve.validation else "-"
            marker = "." if len(curve.steps) < 50 else None
            axes.plot(curve.steps, curve.values, style, label=name, color=f"C{curve.run % 10}", marker=marker)
        if panel.curves:
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
            axes.legend()
    figure.savefig(path, dpi=150)
