"""`titanplans plot`: draw the logged losses, gradient norms and tokens/s of runs in the terminal or as a picture."""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titanplans.disk import name_file_in_errors
from titanplans.errors import ConfigError
from titanplans.text import some
from titanplans.training.trainer.jsonl import FILE_NAME, read_metrics

LOSS = "loss_metrics/global_avg_loss"
VALIDATION_LOSS = "validation_metrics/loss"
TOKENS = "throughput/all_devices(tps)"
FORMATS = (".png", ".svg", ".pdf")
PANELS = {
    "loss, nats/token": (LOSS, VALIDATION_LOSS),
    "norm of the gradient": ("grad_norm",),
    "tokens/s": (TOKENS,),
}
"""The panels, by title, and the keys of metrics.jsonl that are drawn in each."""
_MARKERS = ("*o", "+x", "#@", "%&", "=~")
"""Characters of each run's training and validation curves in a terminal."""
_COLORS = ("blue", "orange", "green", "red", "magenta")


class Curve(NamedTuple):
    """A logged metric of a run over its steps."""

    name: str
    run: int
    """The run's index, which determines its colour in all panels."""
    is_validation: bool
    steps: list[int]
    values: list[float]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="titanplans plot",
        description="Plot losses, gradient norms and tokens/s of runs against steps, from the logs of "
        "--metrics.enable_jsonl. titanplans sweep draws the table of a sweep.",
        epilog="exit status: 0 drawn, 2 nothing to draw, or the command can't be run as written",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a job's dump_folder")
    words = "write a .png, .svg or .pdf file instead of drawing in the terminal"
    parser.add_argument("--output", type=Path, metavar="FILE", help=words)
    return parser


def main(argv: list[str]) -> int:
    """Draw the runs named in `argv`; return the exit status.

    Raises:
        UserError: the runs can't be drawn, or the picture can't be written.
    """
    arguments = parser().parse_args(argv)
    if (path := arguments.output) is not None:
        if path.suffix not in FORMATS:
            raise ConfigError(f"plot --output {path}: a picture's name ends with {', '.join(FORMATS)}")
        if not path.parent.is_dir():
            raise ConfigError(f"plot --output {path}: there is no folder {path.parent}")
    panels, notes = read(arguments.runs)
    if path is None:
        has_colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(draw_text(panels, width=shutil.get_terminal_size((100, 24)).columns, has_colors=has_colors))
    else:
        with name_file_in_errors(path):
            draw_picture(panels, path)
        print(path)
    print("".join(f"{note}\n" for note in notes), end="")
    return 0


def read(folders: Sequence[str]) -> tuple[dict[str, list[Curve]], list[str]]:
    """Return the curves of the runs in these dump_folders, by panel; and a note for each metric that is not always finite.

    Raises:
        ConfigError: a run has no metrics file, a file is damaged, or none of the logged metrics can be drawn.
    """
    panels: dict[str, list[Curve]] = {title: [] for title in PANELS}
    notes = []
    for run, folder in enumerate(folders):
        rows = read_metrics(_metrics(Path(folder)))
        for title, keys in PANELS.items():
            for key in keys:
                is_validation = key == VALIDATION_LOSS
                name = f"{folder}, validation" if is_validation else folder
                values = {row["step"]: row[key] for row in rows if row.get(key) is not None}
                if values:
                    panels[title].append(Curve(name, run, is_validation, [*values], [*values.values()]))
                # Values that are not finite are logged as null.
                if steps := [str(row["step"]) for row in rows if key in row and row[key] is None]:
                    notes.append(f"{name}: {title} is not finite at step {some(steps)}")
    panels = {title: curves for title, curves in panels.items() if curves}
    if not panels:
        raise ConfigError(f"plot {' '.join(folders)}: no metric has been logged there yet")
    return panels, notes


def _metrics(folder: Path) -> Path:
    """Return the metrics file of a run; if there is one for each rank, the file of rank 0."""
    for file in (folder / FILE_NAME, folder / "rank_0" / FILE_NAME):
        if file.is_file():
            return file
    raise ConfigError(
        f"plot {folder}: there is no {FILE_NAME}, which a job writes with --metrics.enable_jsonl; name such a job's "
        "job.dump_folder"
    )


def draw_text(panels: Mapping[str, list[Curve]], *, width: int, has_colors: bool) -> str:
    """Draw `panels` one below the other as text, `width` characters wide."""
    import plotext

    def marker(curve: Curve) -> str:
        return _MARKERS[curve.run % len(_MARKERS)][curve.is_validation]

    legend = {marker(curve): curve.name for curves in panels.values() for curve in curves}
    lines = [f"{character} {name}" for character, name in legend.items()]
    for title, curves in panels.items():
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plotsize(width, 16)
        plotext.title(title)
        for curve in curves:
            color = _COLORS[curve.run % len(_COLORS)]
            plotext.plot(curve.steps, curve.values, marker=marker(curve), color=color)
        steps = [step for curve in curves for step in curve.steps]
        first, last = min(steps), max(steps)
        plotext.xticks(sorted({first + (last - first) * i // 5 for i in range(6)}))
        lines.append(plotext.build())
    return "\n".join(lines if has_colors else map(plotext.uncolorize, lines))


def draw_picture(panels: Mapping[str, list[Curve]], path: Path) -> None:
    """Draw `panels` one below the other as a picture, and write it to `path`."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 3.2 * len(panels)), layout="constrained")
    axes_of_panels = picture.subplots(len(panels), squeeze=False)[:, 0]
    for (title, curves), axes in zip(panels.items(), axes_of_panels, strict=True):
        for curve in curves:
            style = "--" if curve.is_validation else "-"
            marker = "." if len(curve.steps) < 50 else None
            color = f"C{curve.run % 10}"
            axes.plot(curve.steps, curve.values, style, label=curve.name, color=color, marker=marker)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    picture.savefig(path, dpi=150)


def draw_bars(rows: Sequence[Mapping[str, Any]], formats: Mapping[str, str], path: Path) -> None:
    """Draw the table of a sweep as a picture: a panel for each column of `formats`, with a bar for each cell."""
    from matplotlib.figure import Figure

    titles = [title for title in formats if any(row[title] != "" for row in rows)]
    if not titles:
        return
    picture = Figure(figsize=(9, (0.6 + 0.25 * len(rows)) * len(titles)), layout="constrained")
    for title, axes in zip(titles, picture.subplots(len(titles), squeeze=False)[:, 0], strict=True):
        values = {row["cell"]: row[title] for row in rows if row[title] != ""}
        bars = axes.barh(list(values), list(values.values()))
        axes.bar_label(bars, [format(value, formats[title]) for value in values.values()], padding=3)
        low, high = min(values.values()), max(values.values())
        axes.set_title(title)
        axes.margins(x=0.15)
        if title.endswith("loss") and high > low:  # losses are far from 0, and differ little
            base = low - (high - low) / 4
            axes.set_xlim(left=base)
            axes.set_title(f"{title}; bars begin at {base:{formats[title]}}")
        axes.invert_yaxis()  # the first cell on top
    picture.savefig(path, dpi=150)
