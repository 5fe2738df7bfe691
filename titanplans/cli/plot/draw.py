"""Panels as text for a terminal, by plotext, or as a picture, by matplotlib, which is installed on request."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import plotext

from titanplans.cli.plot.read import Curve, Panel
from titanplans.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")
_MARKERS = ("*o", "+x", "#@", "%&", "=~")
"""Characters of each run's curves, the second for its validation."""
_COLORS = ("blue", "orange", "green", "red", "magenta")
_HEIGHT = 16


def draw(panels: Sequence[Panel], *, width: int, colors: bool) -> str:
    """Return `panels`, one below the other, as lines of `width` characters."""
    legend = {_marker(curve): name for panel in panels for name, curve in panel.curves.items()}
    drawn = [_drawn(panel, width) for panel in panels]
    lines = [*(f"{marker} {name}" for marker, name in legend.items()), *drawn]
    return "\n".join(lines if colors else map(plotext.uncolorize, lines))


def _marker(curve: Curve) -> str:
    return _MARKERS[curve.run % len(_MARKERS)][curve.validation]


def _drawn(panel: Panel, width: int) -> str:
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, len(panel.bars) + 4 if panel.bars else _HEIGHT)
    plotext.title(panel.title)
    if panel.bars:
        names, values = list(panel.bars)[::-1], list(panel.bars.values())[::-1]  # the first on top
        plotext.bar(names, values, orientation="horizontal", width=0.01, minimum=panel.base)
    for curve in panel.curves.values():
        color = _COLORS[curve.run % len(_COLORS)]
        plotext.plot(curve.steps, curve.values, marker=_marker(curve), color=color)
    if steps := [step for curve in panel.curves.values() for step in curve.steps]:
        first, last = min(steps), max(steps)
        plotext.xticks(sorted({first + (last - first) * part // 5 for part in range(6)}))
    return plotext.build()


def check_output(path: Path) -> None:
    """Refuse a picture that can't be drawn here.

    Raises:
        ConfigError: another kind of file, a folder that is not there, or matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"plot --output {path}: a picture's name ends with {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"plot --output {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"plot --output {path}: matplotlib is not installed; pip install 'titanplans[plot]', or leave --output out to "
            "draw in the terminal"
        )


def write(panels: Sequence[Panel], path: Path) -> None:
    """Write `panels`, one below the other, as a picture; `check_output` has accepted its path."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(9, 3.2 * len(panels)), layout="constrained"
    )
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
