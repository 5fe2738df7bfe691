"""Draw a pipeline's timeline, computed or measured: one row for each stage, time to the right, bubbles in white.

print(as_text(timeline(orders("1F1B", ranks=4, stages=4, microbatches=8)), "1F1B"))
"""

from xml.sax.saxutils import escape

from titanplans.parallel.pipeline.timeline import Span, Timeline

FILE, MEASURED_FILE = "pipeline.svg", "pipeline_measured.svg"
"""Files in a job's dump folder: the timeline computed from the schedule, and the timeline of a measured step."""
COLOURS = {
    "forward": "#8ab4f8",
    "backward": "#f4a261",
    "backward_input": "#f4a261",
    "backward_weight": "#fbd9b5",
}
LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}
LEGEND = {"forward": "forward", "backward": "backward", "backward_weight": "gradients of weights"}
WIDTH, LEFT, ROW, GAP, TOP = 1000, 110, 24, 8, 44
"""In pixels of the SVG: its width, its left margin, the height of a row, the gap between ranks, and the top margin."""
STYLE = """text { font: 11px system-ui, sans-serif; fill: #1b1f24; text-anchor: middle }
.left { text-anchor: start; font-size: 13px } rect { stroke: #ffffff }"""
DIGIT = 7
"""Width of a digit in the SVG."""


def title_of(timeline: Timeline, name: str) -> str:
    """Return the title: the schedule's name and the fraction of idle time."""
    return f"{name}: {timeline.idle_fraction:.1%} idle"


def as_svg(timeline: Timeline, name: str) -> str:
    """Return the picture as SVG; `name` is the schedule's."""
    scale = (WIDTH - LEFT - GAP) / timeline.duration
    parts, rows = [], rows_of(timeline)
    for row, (rank, stage, spans) in enumerate(rows):
        y = TOP + ROW * row + GAP * rank
        parts.append(f'<text class="left" x="{GAP}" y="{y + 16}">rank {rank}, stage {stage}</text>')
        for action, start, end in spans:
            x, width = LEFT + (start - timeline.start) * scale, (end - start) * scale
            colour, number = COLOURS[action.kind], str(action.microbatch)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 2}" fill="{colour}"/>'
            )
            if DIGIT * len(number) < width:
                parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 15}">{number}</text>')
    y = TOP + ROW * len(rows) + GAP * len(timeline.ranks)
    used = {COLOURS[action.kind] for _, _, spans in rows for action, _, _ in spans}
    legend = {kind: words for kind, words in LEGEND.items() if COLOURS[kind] in used}
    for number, (kind, words) in enumerate(legend.items()):
        x = LEFT + 130 * number
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text class="left" x="{x + 20}" y="{y + 12}">{words}</text>')
    title = escape(title_of(timeline, name))
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + ROW}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{y + ROW}" fill="#ffffff"/>',
        f'<text class="left" x="{GAP}" y="24" font-weight="600">{title}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def as_text(timeline: Timeline, name: str, width: int = 100) -> str:
    """Return the picture as lines of at most `width` characters, with dots for bubbles.

    F is a forward, B a backward, W the gradients of weights; the index of the micro batch follows if it fits, then dashes.
    """
    rows = [(f"rank {rank} stage {stage} ", spans) for rank, stage, spans in rows_of(timeline)]
    left = max(len(label) for label, _ in rows)
    columns = width - left
    # The shortest computation gets an integer number of columns, if the timeline then fits the width.
    shortest = min(span.end - span.start for _, spans in rows for span in spans)
    scale = max(1, int(columns * shortest / timeline.duration)) / shortest
    scale = min(scale, columns / timeline.duration)
    lines = [title_of(timeline, name)]
    for label, spans in rows:
        line = ["."] * round(timeline.duration * scale)
        for action, start, end in spans:
            first, last = (round((time - timeline.start) * scale) for time in (start, end))
            letter, room = LETTERS[action.kind], last - first
            numbered = f"{letter}{action.microbatch}"
            line[first:last] = (numbered if len(numbered) <= room else letter).ljust(room, "-")[:room]
        lines.append(label.ljust(left) + "".join(line))
    return "\n".join(lines)


def rows_of(timeline: Timeline) -> list[tuple[int, int, list[Span]]]:
    """Return a row (rank, stage, spans) for each stage of each rank, in order."""
    return [
        (rank, stage, [span for span in spans if span.action.stage == stage])
        for rank, spans in enumerate(timeline.ranks)
        for stage in sorted({span.action.stage for span in spans})
    ]
