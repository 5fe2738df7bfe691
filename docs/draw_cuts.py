"""Draw docs/cuts.svg: a mixer split by weights (tensor parallelism), and below it the same mixer split by tokens.

    python docs/draw_cuts.py     # docs/generate.py does it, too

The styles come from the plan. Only their positions on the page are set here.
"""

from pathlib import Path

from draw_block import ARROW_TIP, COLOURS, STYLE, box, of_block

PICTURE = Path(__file__).parent / "cuts.svg"
WIDTH, HEIGHT, TOP, LANE = 1240, 490, 74, 220
STEPS = (("q_proj", "k_proj", "v_proj"), ("attention",), ("o_proj",))
CUTS = {
    "by weights, two ranks: each has all tokens, and the weights of its heads": (
        "all-gather|tokens",
        ("all tokens x own rows", "all tokens, own heads", "all tokens x own columns"),
        "reduce-scatter|partial sums",
        ("", ""),
    ),
    "by tokens, two ranks: each has its tokens, and all weights": (
        "",
        ("own tokens x all rows", "all tokens, own heads", "own tokens x all columns"),
        "",
        ("all-to-all|tokens for heads", "all-to-all|heads for tokens"),
    ),
}
"""By title, the text of the picture: the collective at the entry, the operands of each step, and the collectives at the exit
and between the steps."""


def picture() -> str:
    """Return the picture, as SVG."""
    styles = of_block()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>A mixer split by weights, and by tokens</title>",
        f"<style>{STYLE}</style>",
        ARROW_TIP,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for number, (title, (enters, does, leaves, between)) in enumerate(CUTS.items()):
        top = TOP + number * LANE
        parts += [
            f'<text class="left stream" x="14" y="{top - 42}">{title}</text>',
            f'<line class="bar" x1="12" y1="{top}" x2="90" y2="{top}"/>',
            f'<line class="bar" x1="{WIDTH - 100}" y1="{top}" x2="{WIDTH - 12}" y2="{top}"/>',
        ]
        parts += sent(150, top, enters) + sent(1090, top, leaves)
        for step, (names, words) in enumerate(zip(STEPS, does, strict=True)):
            x = 260 + step * 290
            for at, name in enumerate(names):
                given = styles.get(f"self_attn.{name}", "the model's own kernel")
                parts += box(x, top - 8 + at * 50, name, given, COLOURS.get(given, "#ffffff"), 150)
            parts.append(f'<text class="style" x="{x + 75}" y="{top - 16}">{words}</text>')
            if step < 2:
                parts += sent(x + 220, top + 14, between[step])
        parts.append(f'<line x1="94" y1="{top + 14}" x2="254" y2="{top + 14}"/>')
        for x in (414, 704):
            parts.append(f'<line x1="{x}" y1="{top + 14}" x2="{x + 132}" y2="{top + 14}"/>')
        parts.append(f'<line x1="994" y1="{top + 14}" x2="{WIDTH - 104}" y2="{top + 14}"/>')
    return "\n".join([*parts, "</svg>", ""])


def sent(x: int, y: int, words: str) -> list[str]:
    """Return two lines: a collective, and the values that it sends."""
    what, _, of = words.partition("|")
    if not what:
        return []
    return [
        f'<text class="comm" x="{x}" y="{y + 34}">{what}</text>',
        f'<text class="comm" x="{x}" y="{y + 50}">{of}</text>',
    ]


if __name__ == "__main__":
    PICTURE.write_text(picture())
