"""The table as a picture: a row a cell, a panel a figure, bars from zero with their numbers beside them.

Drawn with Pillow, which TensorBoard and torchtitan bring along: bars and words need no plotting library.
"""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from titanplans.cli.sweep.figures import FIGURES, Figure
from titanplans.cli.sweep.table import Row

PANELS = ("loss_last", "tokens_per_second", "peak_memory_gib", "bytes_per_step")

_TEXT, _TITLE = 20, 26  # heights of letters, in pixels
_ROW, _BAR = 40, 26
_PANEL, _NUMBER, _GAP, _MARGIN = 200, 110, 30, 24
_INK, _PALE, _AXIS, _ALARM = "#202020", "#767676", "#c8c8c8", "#b03030"
_COLOURS = ("#4c72b0", "#55a868", "#dd8452", "#8172b3")


def draw(title: str, rows: list[Row], path: Path) -> None:
    """Write the picture as PNG; figures that no cell has get no panel."""
    by_name = {figure.name: figure for figure in FIGURES}
    panels = [by_name[name] for name in PANELS if any(row.figure(name) is not None for row in rows)]
    font, large = ImageFont.load_default(_TEXT), ImageFont.load_default(_TITLE)
    names = max(int(font.getlength(row.cell.name)) for row in rows)
    left = _MARGIN + names + _GAP
    step = _PANEL + _NUMBER + _GAP
    top = _MARGIN + _TITLE + 2 * _TEXT + 34
    width = max(left + max(1, len(panels)) * step, 2 * _MARGIN + int(large.getlength(title)))
    image = Image.new("RGB", (width, top + len(rows) * _ROW + _MARGIN), "white")
    pen = ImageDraw.Draw(image)

    pen.text((_MARGIN, _MARGIN), title, _INK, large)
    for line, row in enumerate(rows):
        middle = top + line * _ROW + _ROW // 2
        pen.text((left - _GAP // 2, middle), row.cell.name, _INK, font, anchor="rm")
        if row.state != "finished":
            pen.text((left + 8, middle), row.state, _ALARM, font, anchor="lm")
    for index, figure in enumerate(panels):
        x = left + index * step
        _panel(pen, font, (x, top), figure, rows, _COLOURS[index])
    image.save(path, optimize=True)


def _panel(
    pen: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    corner: tuple[int, int],
    figure: Figure,
    rows: list[Row],
    colour: str,
) -> None:
    x, top = corner
    pen.text((x, top - 2 * _TEXT - 14), figure.title, _INK, font)
    pen.text((x, top - _TEXT - 10), figure.unit, _PALE, font)
    pen.line([(x, top), (x, top + len(rows) * _ROW)], _AXIS, 2)
    largest = max(value for row in rows if (value := row.figure(figure.name)) is not None)
    for line, row in enumerate(rows):
        value = row.figure(figure.name)
        if row.state != "finished":
            continue
        middle = top + line * _ROW + _ROW // 2
        if value is None:
            pen.text((x + 8, middle), "not known", _PALE, font, anchor="lm")
            continue
        length = round(_PANEL * value / largest) if largest > 0 else 0
        pen.rectangle([(x, middle - _BAR // 2), (x + length, middle + _BAR // 2)], colour)
        pen.text((x + length + 8, middle), row.shown(figure), _INK, font, anchor="lm")
