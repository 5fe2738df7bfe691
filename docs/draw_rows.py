"""Draws docs/rows.svg: how the loader's packers turn documents of two sources into sequences, by cutting and by best fit.

python docs/draw_rows.py     # docs/generate.py does it, too
"""

import itertools
from pathlib import Path

import numpy as np
from draw_block import STYLE

from titanplans.training.data.packing import TokenSequence, pack, pack_best_fit

PICTURE = Path(__file__).parent / "rows.svg"
WIDTH, LANE, UNIT, LEFT = 1240, 34, 16, 120
SEQ_LEN = 64
SOURCES = {"code": (50, 21, 38, 90, 12, 33, 27, 45), "prose": (9, 14, 11, 30, 7, 22, 18, 13)}
"""Lengths in tokens of the documents of two sources."""
ORDER = ("code", "code", "prose", "code")
"""The sources of four sequences, with weights 3 and 1."""
COLOURS = {"code": ("#cfe8ff", "#a5d1fb"), "prose": ("#d8f3dc", "#b1dfba")}


def picture() -> str:
    """Return the picture, as SVG."""
    kinds = {
        'packing = "cut": no token is lost': lambda of: pack(of, SEQ_LEN, apart=True),
        'packing = "best_fit": documents that fit a sequence stay whole, with padding': lambda of: (
            pack_best_fit(of, SEQ_LEN)
        ),
    }
    height = 40 + len(kinds) * (len(ORDER) * LANE + 56)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Documents of two sources as sequences</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    top = 40
    for title, packed in kinds.items():
        parts.append(f'<text class="left stream" x="14" y="{top - 12}">{title}</text>')
        rows = {name: packed(documents(lengths)) for name, lengths in SOURCES.items()}
        for source in ORDER:
            parts += row(top, source, next(rows[source]))
            top += LANE
        top += 56
    return "\n".join([*parts, "</svg>", ""])


def documents(lengths: tuple[int, ...]) -> list[tuple[int, np.ndarray]]:
    """Return (index, tokens) for documents of these lengths; every token of a document is the document's index."""
    return [(number, np.full(length, number)) for number, length in enumerate(lengths)]


def row(top: int, source: str, sequence: TokenSequence) -> list[str]:
    """Return a row of the picture: a box for each document with its number of tokens, and a dashed box for padding."""
    starts = [*np.flatnonzero(sequence.positions == 0), len(sequence.positions)]
    parts = [f'<text class="left style" x="14" y="{top + 17}">{source}</text>']
    for number, (first, last) in enumerate(itertools.pairwise(starts)):
        colour, x, wide = COLOURS[source][number % 2], LEFT + first * UNIT, (last - first) * UNIT
        parts += [
            f'<rect x="{x}" y="{top}" width="{wide}" height="24" fill="{colour}" stroke="#57606a"/>',
            f'<text class="style" x="{x + wide / 2}" y="{top + 17}">{last - first}</text>',
        ]
    if (padding := SEQ_LEN - len(sequence.positions)) > 0:
        x = LEFT + len(sequence.positions) * UNIT
        parts.append(
            f'<rect x="{x}" y="{top}" width="{padding * UNIT}" height="24" fill="none" stroke="#57606a" '
            'stroke-dasharray="4"/>'
        )
    return parts


if __name__ == "__main__":
    PICTURE.write_text(picture())
