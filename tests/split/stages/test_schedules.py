"""Orders of torch's schedules: each computation occurs once, nothing deadlocks, and what torch refuses is refused
earlier."""

import itertools
from typing import get_args

import pytest

from titanplans.config.sections.parallelism import PipelineParallel
from titanplans.errors import ParallelError
from titanplans.split.stages.schedules import (
    SCHEDULES,
    Action,
    check_schedule,
    completed,
    merge_orders,
    needs,
    orders,
    stage_count,
    stages_of_ranks,
)
from titanplans.torch_private.pipelining import rank_orders

SIZES = list(itertools.product(SCHEDULES, (1, 2, 4), (1, 2, 3), (1, 2, 3, 4, 7, 8, 9)))
"""By case: the schedule, the ranks, the stages per rank, and the micro batches."""


def allowed(schedule, ranks, each, microbatches):
    try:
        check_schedule(schedule, ranks, ranks * each, microbatches)
    except ParallelError:
        return False
    return True


def letters_of(schedule, ranks, stages, microbatches):
    """Return the orders as torch writes them, with its letters."""
    letters = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
    return [
        " ".join(f"{action.stage}{letters[action.kind]}{action.microbatch}" for action in order)
        for order in orders(schedule, ranks, stages, microbatches)
    ]


def test_the_schedules_are_those_of_the_option():
    assert get_args(PipelineParallel.model_fields["pipeline_parallel_schedule"].annotation) == tuple(
        SCHEDULES
    )


def test_each_computation_occurs_once_and_after_its_inputs():
    for schedule, ranks, each, microbatches in (size for size in SIZES if allowed(*size)):
        stages = ranks * each
        by_rank = orders(schedule, ranks, stages, microbatches)
        placed = [{action.stage for action in order} for order in by_rank]
        assert placed == list(map(set, stages_of_ranks(schedule, ranks, stages)))
        merged = merge_orders(by_rank)
        backwards = {"backward", "backward_input"} if SCHEDULES[schedule].splits_backward else {"backward"}
        assert len(merged) == len(set(merged)) == sum(map(len, by_rank))
        assert {action.kind for action in merged} - {"forward", "backward_weight"} <= backwards
        assert {completed(action) for action in merged if action.kind != "backward_weight"} == {
            Action(stage, kind, microbatch)
            for stage in range(stages)
            for kind in ("forward", "backward_input")
            for microbatch in range(microbatches)
        }
        split_backwards = {(a.stage, a.microbatch) for a in merged if a.kind == "backward_input"}
        assert split_backwards == {(a.stage, a.microbatch) for a in merged if a.kind == "backward_weight"}
        done = set()
        for action in merged:
            assert done.issuperset(needs(action, stages))
            done.add(completed(action))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_orders_that_torch_refuses_are_refused(schedule):
    """titanplans also refuses a looped schedule with one stage per rank. torch accepts it, and runs 1F1B or GPipe."""
    for _, ranks, each, microbatches in (size for size in SIZES if size[0] == schedule):
        if schedule in ("GPipe", "1F1B") and each > 1:
            continue  # torch is given one stage
        try:
            rank_orders(schedule, ranks, ranks * each, microbatches)
        except (ValueError, KeyError, AssertionError):
            taken = False
        else:
            taken = each in SCHEDULES[schedule].stages_per_rank
        assert allowed(schedule, ranks, each, microbatches) == taken, (ranks, each, microbatches)


def test_the_orders_of_small_pipelines():
    assert letters_of("1F1B", 2, 2, 3) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert letters_of("GPipe", 2, 2, 2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert letters_of("LoopedBFS", 2, 4, 1) == ["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"]
    first, second = letters_of("DualPipeV", 2, 4, 4)
    assert first.startswith("0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0")
    assert second.endswith("2I3 1I3 2W3 1W3")


def test_the_number_of_stages():
    assert stage_count("1F1B", 4, 22) == 4
    assert stage_count("Interleaved1F1B", 4, 22) == 8
    assert stage_count("Interleaved1F1B", 4, 22, layers_per_stage=2) == 11
    assert stage_count("Interleaved1F1B", 4, 22, layers_per_stage=3) == 8


def test_the_stages_of_a_rank():
    assert stages_of_ranks("Interleaved1F1B", 2, 6) == ((0, 2, 4), (1, 3, 5))
    assert stages_of_ranks("ZBVZeroBubble", 3, 6) == ((0, 5), (1, 4), (2, 3))


def test_orders_that_never_end_are_refused():
    backward_first = ((Action(0, "backward", 0), Action(0, "forward", 0)),)
    with pytest.raises(ParallelError, match="the backward of micro batch 0 in stage 0 waits for an action"):
        merge_orders(backward_first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 2, 2, 4), 'schedule = "1f1b": no such schedule; there are GPipe, 1F1B'),
        (("1F1B", 3, 4, 4), "4 stages over 3 ranks: .*; 3 or 6 stages would work"),
        (("1F1B", 2, 4, 4), "1F1B with 2 stages per rank: it takes 1; make 2 stages for 2 ranks, or"),
        (("Interleaved1F1B", 2, 2, 4), "it takes 2 or more; make 4 stages .* or choose GPipe or 1F1B"),
        (("DualPipeV", 2, 6, 8), "DualPipeV with 3 stages per rank: it takes 2; make 4 stages"),
        (("1F1B", 4, 4, 2), "1F1B with 2 micro batches: it needs one for each rank; 4 or more would work"),
        (
            ("DualPipeV", 2, 4, 3),
            "it needs one for each stage; 4 or more would work, or choose ZBVZeroBubble",
        ),
        (("Interleaved1F1B", 4, 8, 9), "it runs them in 2 equal rounds; 8 or 12 would work"),
    ],
)
def test_a_refusal_names_what_would_work(arguments, message):
    with pytest.raises(ParallelError, match=message):
        orders(*arguments)
