"""Pictures of timelines: each box at its time and in the row of its stage, and no box where a rank is idle."""

from xml.etree import ElementTree

import pytest

from titanplans.parallel.pipeline.picture import COLOURS, as_svg, as_text
from titanplans.parallel.pipeline.timeline import Span, Timeline, timeline
from titanplans.split.stages.schedules import SCHEDULES, Action, orders

SVG = "{http://www.w3.org/2000/svg}"


def small():
    return timeline(orders("1F1B", 2, 2, 3))


def test_picture_as_text():
    assert as_text(small(), "1F1B", width=31).splitlines() == [
        "1F1B: 25.0% idle",
        "rank 0 stage 0 FF..B0FB1.B2",
        "rank 1 stage 1 .FB0FB1FB2..",
    ]
    wide = as_text(small(), "1F1B").splitlines()
    assert (
        wide[2].split()[-1]
        == ".......F0-----B0------------F1-----B1------------F2-----B2------------.............."
    )


@pytest.mark.parametrize("microbatches", [8, 64])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_text_is_as_wide_as_a_terminal(schedule, microbatches):
    each = SCHEDULES[schedule].stages_per_rank[0]
    lines = as_text(timeline(orders(schedule, 4, 4 * each, microbatches)), schedule).splitlines()
    assert len(lines) == 1 + 4 * each
    assert 65 < max(map(len, lines)) <= 100
    assert len({len(line) for line in lines[1:]}) == 1


def test_measured_times_begin_at_any_clock():
    spans = [Span(Action(0, "forward", 0), 1000.5, 1000.51), Span(Action(0, "backward", 0), 1000.6, 1000.7)]
    line = as_text(Timeline((tuple(spans),)), "measured").splitlines()[1]
    assert line.startswith("rank 0 stage 0 F0--")
    assert line.endswith(".B0" + "-" * 38)
    assert (
        as_svg(Timeline((tuple(spans),)), "measured <1 & 2>").count("measured &lt;1 &amp; 2&gt;: 45.0% idle")
        == 2
    )


def test_picture_as_svg():
    """Twelve boxes on a scale of 12 time steps in 882 pixels; an idle rank is white."""
    times = timeline(orders("1F1B", 2, 2, 3))
    tree = ElementTree.fromstring(as_svg(times, "1F1B"))
    boxes = [box.attrib for box in tree.iter(f"{SVG}rect") if box.get("height") == "22"]
    spans = [span for rank in times.ranks for span in rank]
    assert [float(box["x"]) for box in boxes] == pytest.approx(
        [110 + 882 / 12 * s.start for s in spans], abs=0.1
    )
    assert [box["fill"] for box in boxes] == [COLOURS[span.action.kind] for span in spans]
    assert [box["y"] for box in boxes] == ["44"] * 6 + ["76"] * 6
    assert tree.find(f"{SVG}title").text == "1F1B: 25.0% idle"
    numbers = [text.text for text in tree.iter(f"{SVG}text") if text.get("class") is None]
    assert numbers[:6] == ["0", "1", "0", "2", "1", "2"]


@pytest.mark.parametrize(("schedule", "entries"), [("1F1B", 2), ("InterleavedZeroBubble", 3)])
def test_the_legend_has_the_entries_of_the_picture(schedule, entries):
    tree = ElementTree.fromstring(
        as_svg(timeline(orders(schedule, 2, 2 if entries == 2 else 4, 4)), schedule)
    )
    assert len([box for box in tree.iter(f"{SVG}rect") if box.get("height") == "14"]) == entries
