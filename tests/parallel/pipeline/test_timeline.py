"""The idle share of each schedule against the published formulas, and what a slow stage costs.

Of p = 4 ranks, m micro batches, v stages a rank; a forward takes 1, a backward 2, each half of a split one 1:

    schedule               v   m = 8   m = 16
    GPipe, 1F1B            1   27.3 %  15.8 %   (p - 1) / (m + p - 1)
    LoopedBFS              2   15.8 %   8.6 %   (p - 1) / (v m + p - 1)
    Interleaved1F1B        2   15.8 %   8.6 %   the same
    InterleavedZeroBubble  2    5.9 %   3.0 %   (p - 1) / (3 v m + p - 1)
    ZBVZeroBubble          2    5.9 %   3.0 %   the same
    DualPipeV              2    5.9 %   3.0 %   the same, though it has whole backwards in its middle
"""

import pytest

from titanplans.parallel.pipeline.timeline import timeline
from titanplans.split.stages.schedules import Action, orders


def idle(schedule, ranks, each, microbatches):
    return timeline(orders(schedule, ranks, ranks * each, microbatches)).idle_fraction


@pytest.mark.parametrize("microbatches", [4, 7, 16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_one_stage_a_rank(schedule, ranks, microbatches):
    assert idle(schedule, ranks, 1, microbatches) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("microbatches", [1, 3, 4, 7, 8, 10, 16])
@pytest.mark.parametrize("each", [2, 4])
@pytest.mark.parametrize("schedule", ["LoopedBFS", "Interleaved1F1B"])
def test_several_stages_a_rank(schedule, each, microbatches):
    """With fewer micro batches than ranks, each waits until the first one has come around."""
    ranks, work = 4, each * microbatches
    bubble = ranks - 1 if microbatches >= ranks else each * (ranks - microbatches) + microbatches - 1
    assert idle(schedule, ranks, each, microbatches) == pytest.approx(bubble / (work + bubble))


@pytest.mark.parametrize("microbatches", [8, 16])
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_weight_parts_fill_the_bubble(schedule, microbatches):
    assert idle(schedule, 4, 2, microbatches) == pytest.approx(3 / (3 * 2 * microbatches + 3))


def test_a_slow_stage_sets_the_pace():
    """The second of two stages takes twice as long: it is busy from its first forward to its last backward."""
    times = {"forward": (1.0, 2.0), "backward": (2.0, 4.0)}
    found = timeline(orders("1F1B", 2, 2, 8), lambda kind, stage: times[kind][stage])
    assert [span.start for span in found.ranks[1][:3]] == [1, 3, 7]
    assert found.duration == 1 + 8 * 6 + 2
    assert found.idle_fraction == pytest.approx(1 - (24 + 48) / (2 * 51))


def test_a_computation_starts_when_what_it_needs_is_there():
    found = timeline(orders("GPipe", 2, 2, 2))
    starts = {span.action: span.start for spans in found.ranks for span in spans}
    assert starts[Action(1, "forward", 0)] == 1
    assert starts[Action(1, "backward", 0)] == 3
    assert starts[Action(0, "backward", 0)] == 5
    assert starts[Action(0, "backward", 1)] == 7
