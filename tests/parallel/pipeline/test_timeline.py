"""The idle fraction of each schedule against published formulas, and the cost of a slow stage.

For p = 4 ranks, m micro batches, v stages per rank; a forward takes 1, a backward 2, each half of a split backward 1:

    schedule               v   m = 8   m = 16
    GPipe, 1F1B            1   27.3 %  15.8 %   (p - 1) / (m + p - 1)
    LoopedBFS              2   15.8 %   8.6 %   (p - 1) / (v m + p - 1)
    Interleaved1F1B        2   15.8 %   8.6 %   the same
    InterleavedZeroBubble  2    5.9 %   3.0 %   (p - 1) / (3 v m + p - 1)
    ZBVZeroBubble          2    5.9 %   3.0 %   the same
    DualPipeV              2    5.9 %   3.0 %   the same, although it has full backwards in its middle
"""

import pytest

from titanplans.parallel.pipeline.timeline import timeline
from titanplans.split.stages.schedules import Action, orders


def idle(schedule, ranks, each, microbatches):
    return timeline(orders(schedule, ranks, ranks * each, microbatches)).idle_fraction


@pytest.mark.parametrize("microbatches", [4, 7, 16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_idle_fraction_with_one_stage_per_rank(schedule, ranks, microbatches):
    assert idle(schedule, ranks, 1, microbatches) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("microbatches", [1, 3, 4, 7, 8, 10, 16])
@pytest.mark.parametrize("each", [2, 4])
@pytest.mark.parametrize("schedule", ["LoopedBFS", "Interleaved1F1B"])
def test_idle_fraction_with_several_stages_per_rank(schedule, each, microbatches):
    """With fewer micro batches than ranks, a rank waits until the first micro batch has passed all ranks."""
    ranks, work = 4, each * microbatches
    bubble = ranks - 1 if microbatches >= ranks else each * (ranks - microbatches) + microbatches - 1
    assert idle(schedule, ranks, each, microbatches) == pytest.approx(bubble / (work + bubble))


@pytest.mark.parametrize("microbatches", [8, 16])
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_backwards_of_weights_fill_the_bubble(schedule, microbatches):
    assert idle(schedule, 4, 2, microbatches) == pytest.approx(3 / (3 * 2 * microbatches + 3))


def test_a_slow_stage_sets_the_pace():
    """The second of two stages takes twice as long, and is busy from its first forward to its last backward."""
    times = {"forward": (1.0, 2.0), "backward": (2.0, 4.0)}
    times_of_ranks = timeline(orders("1F1B", 2, 2, 8), lambda kind, stage: times[kind][stage])
    assert [span.start for span in times_of_ranks.ranks[1][:3]] == [1, 3, 7]
    assert times_of_ranks.duration == 1 + 8 * 6 + 2
    assert times_of_ranks.idle_fraction == pytest.approx(1 - (24 + 48) / (2 * 51))


def test_a_computation_starts_when_its_inputs_are_ready():
    times = timeline(orders("GPipe", 2, 2, 2))
    starts = {span.action: span.start for spans in times.ranks for span in spans}
    assert starts[Action(1, "forward", 0)] == 1
    assert starts[Action(1, "backward", 0)] == 3
    assert starts[Action(0, "backward", 0)] == 5
    assert starts[Action(0, "backward", 1)] == 7
