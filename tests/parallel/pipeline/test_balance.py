"""Stage splits of a model: the best by cost, and those that begin at named blocks."""

import random
from itertools import combinations, pairwise

import pytest

from titanplans import find_decoder, modeling
from titanplans.errors import ParallelError
from titanplans.modeling import flops_of_blocks
from titanplans.parallel.pipeline.balance import balance, stage_starts

NAMES = [f"model.layers.{index}" for index in range(12)]


def best_of_all(costs, first, last, stages):
    """Return the bounds of the best of all stage splits, according to the rule of `balance`."""
    blocks = len(costs)

    def order(bounds):
        stage_costs = [sum(costs[a:b]) + first * (a == 0) + last * (b == blocks) for a, b in pairwise(bounds)]
        return max(stage_costs), sum(cost**2 for cost in stage_costs), bounds

    splits = ((0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1))
    return min(splits, key=order)[:-1]


def test_the_split_with_the_lowest_cost_is_chosen():
    draw = random.Random(0)
    for _ in range(300):
        costs = [draw.randint(0, 6) for _ in range(draw.randint(1, 9))]
        arguments = (costs, draw.randint(0, 9), draw.randint(0, 9), draw.randint(1, len(costs)))
        assert balance(*arguments) == best_of_all(*arguments)


def test_of_equal_costs_even_splits_with_short_early_stages_are_chosen():
    assert balance([1] * 5, 0, 0, 2) == (0, 2)
    assert balance([1] * 8, 0, 4, 3) == (0, 3, 7)
    assert balance([3, 1, 1, 1, 1], 0, 0, 3) == (0, 1, 3)  # not 3, 3, 1


def test_a_large_vocabulary_takes_blocks_off_the_last_stage():
    """Llama 3.2 1B: the head costs as much as 4 of its 16 blocks."""
    model = modeling.build(modeling.load_config("llama", "3.2-1B"))
    flops = flops_of_blocks(model, find_decoder(model), 2048)
    assert balance(flops.blocks, flops.first, flops.last, 4) == (0, 5, 10, 15)


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(
        ParallelError, match=r"^5 stages of 4 blocks: a stage has one block or more; lower pipeline"
    ):
        balance([1] * 4, 0, 0, 5)


def test_stages_begin_at_named_blocks():
    assert stage_starts(NAMES, []) == (0,)
    assert stage_starts(NAMES, ["model.layers.5", "model.layers.11"]) == (0, 5, 11)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (["layers.5"], "layers.5 is not one of the 12 blocks; did you mean model.layers.5"),
        (
            ["model.layers.0"],
            "model.layers.0 does not come after model.layers.0, which begins a stage; .* not the first",
        ),
        (["model.layers.5", "model.layers.3"], "model.layers.3 does not come after model.layers.5"),
        (["model.layers.5", "model.layers.5"], "model.layers.5 does not come after model.layers.5"),
        (["norm"], "norm is not one of the 12 blocks; the last is model.layers.11"),
    ],
)
def test_names_that_begin_no_stage_are_refused(points, message):
    with pytest.raises(ParallelError, match=f"pipeline_parallel_split_points: {message}"):
        stage_starts(NAMES, points)
