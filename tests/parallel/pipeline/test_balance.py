"""Cuts of a model into stages: the best of all there are, and those that someone names."""

import random
from itertools import combinations, pairwise

import pytest

from titanplans import find_decoder, modeling
from titanplans.errors import ParallelError
from titanplans.modeling import flops_of_blocks
from titanplans.parallel.pipeline.balance import balance, stage_starts

NAMES = [f"model.layers.{number}" for number in range(12)]


def best_of_all(costs, first, last, stages):
    """The cut that `balance` describes, found by looking at every one."""
    number = len(costs)

    def rank(cut):
        found = [sum(costs[a:b]) + first * (a == 0) + last * (b == number) for a, b in pairwise(cut)]
        return max(found), sum(cost**2 for cost in found), cut

    cuts = ((0, *inner, number) for inner in combinations(range(1, number), stages - 1))
    return min(cuts, key=rank)[:-1]


def test_the_best_of_all_cuts():
    draw = random.Random(0)
    for _ in range(300):
        costs = [draw.randint(0, 6) for _ in range(draw.randint(1, 9))]
        given = (costs, draw.randint(0, 9), draw.randint(0, 9), draw.randint(1, len(costs)))
        assert balance(*given) == best_of_all(*given)


def test_ties_are_even_and_early_stages_short():
    assert balance([1] * 5, 0, 0, 2) == (0, 2)
    assert balance([1] * 8, 0, 4, 3) == (0, 3, 7)
    assert balance([3, 1, 1, 1, 1], 0, 0, 3) == (0, 1, 3)  # not 3, 3, 1


def test_a_large_vocabulary_takes_blocks_off_the_last_stage():
    """Llama 3.2 1B: the head costs as much as 4 of its 16 blocks."""
    model = modeling.build(modeling.load_config("llama", "3.2-1B"))
    found = flops_of_blocks(model, find_decoder(model), 2048)
    assert balance(found.blocks, found.first, found.last, 4) == (0, 5, 10, 15)


def test_more_stages_than_blocks():
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
def test_what_is_no_place_to_begin_is_refused_by_name(points, message):
    with pytest.raises(ParallelError, match=f"pipeline_parallel_split_points: {message}"):
        stage_starts(NAMES, points)
