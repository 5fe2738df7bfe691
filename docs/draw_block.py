"""Draw docs/block.svg: one block of a model on the residual stream, with the regions and styles of its plan.

    python docs/draw_block.py     # docs/generate.py does it, too

Modules and styles come from `check_plan`. Only their positions on the page are set here.
"""

import re
from pathlib import Path

from titanplans import check_plan, modeling
from titanplans.plan.degrees import Degrees

PICTURE = Path(__file__).parent / "block.svg"
MODEL = "qwen3"
COLUMNS = {
    "self_attn": (
        ("q_proj", "k_proj", "v_proj"),
        ("q_norm", "k_norm"),
        ("attention|local heads",),
        ("o_proj",),
    ),
    "mlp": (("gate_proj", "up_proj"), ("silu, product|local width",), ("down_proj",)),
}
"""The modules of each region from left to right. `words|more words` is code without parameters."""
SPLIT = {"self_attn": "heads", "mlp": "width"}
NORMS = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
WIDTH, HEIGHT, STREAM = 1240, 390, 64
BOX, ROW, GAP = 100, 54, 12
COLOURS = {"colwise": "#cfe3ff", "kv_colwise": "#cfe3ff", "rowwise": "#ffd9b8"}
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1b1f24; text-anchor: middle }
.style { font: 11px ui-monospace, monospace; fill: #57606a }
.left { text-anchor: start } .stream { font-weight: 600 }
.comm { font-size: 12px; fill: #9a3412 }
line, path { stroke: #57606a; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
.bar { stroke: #2f6f4f; stroke-width: 7; marker-end: none }"""
ARROW_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0 8 4 0 8z" style="fill:#57606a;stroke:none;marker-end:none"/></marker></defs>'
)


def picture() -> str:
    """Return the picture, as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>A block on the residual stream: two regions, entered by an all-gather and left by a "
        "reduce-scatter</title>",
        f"<style>{STYLE}</style>",
        ARROW_TIP,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<line class="bar" x1="12" y1="{STREAM}" x2="{WIDTH - 12}" y2="{STREAM}"/>',
        f'<text class="left stream" x="14" y="{STREAM - 22}">residual stream: each rank holds its shard of the '
        "sequence [batch, sequence / ranks, hidden]</text>",
    ]
    styles = of_block()
    left = 24
    for region, columns in COLUMNS.items():
        drawn, left = region_on_stream(region, columns, styles, left)
        parts += drawn
    return "\n".join([*parts, "</svg>", ""])


def of_block() -> dict[str, str]:
    """Return the name that a plan has for the style of each module of the first block, such as "colwise"."""
    model = modeling.build(modeling.load_config(MODEL, "debug", num_hidden_layers=1))
    prefix = "model.layers.0."
    found = {
        k.removeprefix(prefix): s for k, s in check_plan(model, Degrees(tp=2)).items() if k.startswith(prefix)
    }
    return {
        name: re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(s).__name__).lower()
        for name, s in found.items()
    }


def region_on_stream(
    name: str, columns: tuple[tuple[str, ...], ...], styles: dict[str, str], left: int
) -> tuple[list[str], int]:
    """Return the SVG of a norm, a region and the region's borders, and the position where they end.

    Args:
        name: the region.
        columns: the modules of each column of the region.
        styles: the style of each module.
        left: the position where the drawing begins.
    """
    top, bottom, middle = STREAM + 80, HEIGHT - 20, (STREAM + 80 + HEIGHT - 20) // 2
    norm, style = NORMS[name], styles[NORMS[name]]
    assert {name, norm} <= styles.keys(), styles
    x = left + 30
    parts = [
        f'<path d="M{left} {STREAM} V{middle - 24}"/>',
        *box(left - 8, middle - 22, "norm", style.replace("replicated_", ""), "#d8f0e0", 84),
    ]
    inside = left + 84 + 62
    width = len(columns) * (BOX + GAP) + GAP
    parts += [
        f'<line x1="{left + 76}" y1="{middle}" x2="{inside}" y2="{middle}"/>',
        f'<rect x="{inside}" y="{top}" width="{width}" height="{bottom - top}" rx="8" fill="#f6f8fa" '
        'stroke="#57606a" stroke-dasharray="5 4"/>',
        f'<text x="{inside + width / 2}" y="{top + 20}">{name}: full sequence, one slice of the {SPLIT[name]}</text>',
        f'<text class="comm" x="{inside - 34}" y="{top - 30}">all-gather</text>',
        f'<text class="comm" x="{inside - 34}" y="{top - 14}">backward: reduce-scatter</text>',
        f'<path d="M{inside - 32} {top - 8} V{middle - 6}" style="stroke:#9a3412;stroke-dasharray:2 3"/>',
    ]
    for number, names in enumerate(columns):
        x = inside + GAP + number * (BOX + GAP)
        y = middle + 10 - (len(names) * ROW - 10) / 2
        for each in names:
            words, _, more = each.partition("|")
            given = more or styles[f"{name}.{each}"]
            colour = "#ffffff" if more else COLOURS.get(given, "#e8e8e8")
            parts += box(x, y, words, given.replace("replicated_", ""), colour, BOX)
            y += ROW
    end = inside + width
    parts += [
        f'<path d="M{end} {middle} H{end + 34} V{STREAM + 8}"/>',
        f'<circle cx="{end + 34}" cy="{STREAM}" r="9" fill="#ffffff" stroke="#2f6f4f" stroke-width="2"/>',
        f'<text x="{end + 34}" y="{STREAM + 5}">+</text>',
        f'<text class="comm" x="{end - 42}" y="{top - 30}">reduce-scatter</text>',
        f'<text class="comm" x="{end - 42}" y="{top - 14}">backward: all-gather</text>',
    ]
    return parts, end + 60


def box(x: float, y: float, words: str, more: str, colour: str, width: int) -> list[str]:
    """Return a box with the line `words`, and below it the smaller line `more`."""
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="44" rx="5" fill="{colour}" stroke="#8c959f"/>',
        f'<text x="{x + width / 2}" y="{y + 19}">{words}</text>',
        f'<text class="style" x="{x + width / 2}" y="{y + 35}">{more}</text>',
    ]


if __name__ == "__main__":
    PICTURE.write_text(picture())
