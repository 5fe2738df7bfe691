"""Draws docs/house.svg: the packages of titanplans and which imports which, read from their source files.

python docs/draw_house.py     # docs/generate.py does it, too
"""

import itertools
from collections import defaultdict
from functools import cache
from pathlib import Path

from draw_block import ARROW_TIP, STYLE

from tests.support.imports import package_imports

PICTURE = Path(__file__).parent / "house.svg"
COLUMN, WIDTH, HEIGHT, MARGIN = 124, 92, 30, 16
SLOT, LANE = 46, 16
"""The height that a package takes in a column, and the height that a line takes on its way through a column."""


def picture() -> str:
    """Return the picture, as SVG. Each package is to the right of all packages that it imports.

    An arrow is left out if other arrows imply it. For example, cli -> training -> split implies cli -> split.
    """
    imports = package_imports()

    @cache
    def column(name: str) -> int:
        return 1 + max(map(column, imports[name]), default=-1)

    @cache
    def below(name: str) -> frozenset[str]:
        return frozenset(imports[name]).union(*map(below, imports[name]))

    # The points of each column. (package, column) is the package's box if `column` is the package's own; in another
    # column, it is the line that leads to this box.
    columns: defaultdict[int, set[tuple[str, int]]] = defaultdict(set)
    lines: set[tuple[tuple[str, int], tuple[str, int]]] = set()
    for name in imports:
        columns[column(name)].add((name, column(name)))
        for other in imports[name]:
            if any(other in below(each) for each in imports[name]):
                continue
            # All arrows to one package share a line through the columns in between.
            points = [
                (name, column(name)),
                *((other, each) for each in range(column(name) - 1, column(other) - 1, -1)),
            ]
            lines |= set(itertools.pairwise(points))
            for point in points[1:]:
                columns[point[1]].add(point)

    def is_box(point: tuple[str, int]) -> bool:
        return column(point[0]) == point[1]

    middle: dict[tuple[str, int], float] = {}
    for index in sorted(columns):

        def target(point: tuple[str, int]) -> float:
            ends = [middle[end] for start, end in lines if start == point]
            return sum(ends) / max(len(ends), 1)

        # Points are ordered by the positions that their lines lead to, so that few lines cross.
        ordered = sorted(columns[index], key=lambda point: (target(point), point))
        tall = [SLOT if is_box(point) else LANE for point in ordered]
        for place, point in enumerate(ordered):
            middle[point] = sum(tall[:place]) + tall[place] / 2 - sum(tall) / 2
    top = max(-each for each in middle.values()) + SLOT / 2 + MARGIN / 2
    height = top + max(middle.values()) + SLOT / 2 + MARGIN / 2
    width = 2 * MARGIN + (len(columns) - 1) * COLUMN + WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" role="img">',
        "<title>The packages of titanplans; an arrow leads from a package to one that it imports</title>",
        f"<style>{STYLE}\n.through {{ marker-end: none }}</style>",
        ARROW_TIP,
        f'<rect width="{width}" height="{height:g}" fill="#ffffff"/>',
    ]
    for start, end in sorted(lines):
        x, left = MARGIN + start[1] * COLUMN, MARGIN + end[1] * COLUMN + WIDTH
        y, other = middle[start] + top, middle[end] + top
        across = "" if is_box(end) else f"H{left - WIDTH}"
        kind = "" if is_box(end) else ' class="through"'
        bend = (x + left) / 2
        parts.append(
            f'<path{kind} d="M{x} {y:g}C{bend:g} {y:g} {bend:g} {other:g} {left} {other:g}{across}"/>'
        )
    for point in sorted(filter(is_box, middle)):
        x, y = MARGIN + point[1] * COLUMN, middle[point] + top
        parts += [
            f'<rect x="{x}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="#cfe3ff" '
            'stroke="#57606a"/>',
            f'<text x="{x + WIDTH / 2:g}" y="{y + 5:g}">{point[0]}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
