"""Architectures compiled on two gloo ranks: the losses of eager mode, by compiled code.

Architectures with different blocks, one of them by inductor; exhaustively, every registered one by inductor.
"""

import functools

import pytest

from tests import zoo
from tests.support import process_groups
from tests.support.pages import graphs

pytestmark = pytest.mark.thorough


@pytest.fixture(
    scope="module",
    params=[
        (graphs.DIFFERENT, graphs.KERNELS),
        pytest.param((tuple(zoo.ARCHITECTURES),) * 2, marks=pytest.mark.exhaustive),
    ],
    ids=["those that differ", "all, by inductor"],
)
def results(request):
    names, inductor = request.param
    return process_groups.run(functools.partial(graphs.run, names=names, inductor=inductor), 2)


def test_losses_and_norms_are_those_of_eager_mode(results):
    # float32: inductor's sums run in another order, an epsilon (1.2e-7) or two a step; AdamW divides by the gradient's
    # size, which makes more of it where a gradient is all rounding. A dropped sum is off by 1e-2.
    for name, result in results.items():
        for found, expected in zip(result.compiled, result.eager, strict=True):
            assert found[0] == pytest.approx(expected[0], rel=1e-6), name
            assert found[1] == pytest.approx(expected[1], rel=1e-5), name
        assert len({loss for loss, _ in result.eager}) == graphs.STEPS, name


def test_every_block_ran_what_was_compiled_once(results):
    for name, result in results.items():
        assert len(result.calls) == 2 + (name == "gemma3"), "two blocks, and one of the vision tower"
        assert set(result.calls.values()) == {graphs.STEPS}, name
        made = sum(block.graphs for block in result.blocks)
        assert result.graphs[0] == made + 1 > 1, f"{name}: those of the blocks, and the loss"
        # The graph that hands FLA's swiglu a weight is compiled once more: torch has marked the weight's local tensor as
        # requiring a gradient by then.
        again = 1 if any("SwiGLULinear" in block.breaks for block in result.blocks) else 0
        assert result.graphs[1] <= made + 1 + again, name
        assert result.graphs[2] == result.graphs[1], f"{name}: compiled again after the second step"


@pytest.mark.parametrize(
    "name",
    ["gla", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("transformer", "gemma3_text"))],
)
def test_another_length_is_compiled_once_and_then_any(name):
    first, second, third = graphs.lengths(name)
    assert first < second <= 2 * first
    assert third == second


def test_the_page_has_these_graphs_and_breaks(results):
    written = graphs.written(graphs.PAGE.read_text()).splitlines()
    rows = graphs.table(results).splitlines()
    how = "python docs/generate.py graphs.md writes it"
    assert [row for row in written if row in rows] == rows, how
    assert {row.split(" | ")[0].strip("| ") for row in written[2:]} == set(zoo.ARCHITECTURES), how
