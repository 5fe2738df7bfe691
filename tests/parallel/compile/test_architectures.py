"""Architectures compiled on two gloo ranks have the losses of eager mode.

By default, these are architectures with different blocks, one of which inductor compiles; in exhaustive tests inductor
compiles every architecture.
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
    ids=["different blocks", "all, by inductor"],
)
def results(request):
    names, inductor = request.param
    return process_groups.run(functools.partial(graphs.run, names=names, inductor=inductor), 2)


def test_losses_and_norms_equal_those_of_eager_mode(results):
    # In float32, inductor's other order of sums causes errors of one or two epsilons (1.2e-7) per step. AdamW divides by
    # the gradient's size, which amplifies a gradient that consists only of rounding errors. A missing sum would cause an
    # error of 1e-2.
    for name, result in results.items():
        for actual, expected in zip(result.compiled, result.eager, strict=True):
            assert actual[0] == pytest.approx(expected[0], rel=1e-6), name
            assert actual[1] == pytest.approx(expected[1], rel=1e-5), name
        assert len({loss for loss, _ in result.eager}) == graphs.STEPS, name


def test_every_block_is_compiled_once(results):
    for name, result in results.items():
        assert len(result.calls) == 2 + (name == "gemma3"), "two blocks, and one of the vision tower"
        assert set(result.calls.values()) == {graphs.STEPS}, name
        of_blocks = sum(block.graphs for block in result.blocks)
        assert result.graphs[0] == of_blocks + 1 > 1, f"{name}: the graphs of the blocks, and one of the loss"
        # The graph that passes a weight to FLA's swiglu is compiled once more: by then torch has marked the weight's local
        # tensor as requiring a gradient.
        again = 1 if any("SwiGLULinear" in block.breaks for block in result.blocks) else 0
        assert result.graphs[1] <= of_blocks + 1 + again, name
        assert result.graphs[2] == result.graphs[1], f"{name}: recompiled after the second step"


@pytest.mark.parametrize(
    "name",
    ["gla", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("transformer", "gemma3_text"))],
)
def test_a_second_length_compiles_once_for_all_others(name):
    first, second, third = graphs.lengths(name)
    assert first < second <= 2 * first
    assert third == second


def test_the_page_has_these_graphs_and_breaks(results):
    written = graphs.written(graphs.PAGE.read_text()).splitlines()
    lines = graphs.table(results).splitlines()
    how = "python docs/generate.py graphs.md writes it"
    assert [line for line in written if line in lines] == lines, how
    assert {line.split(" | ")[0].strip("| ") for line in written[2:]} == set(zoo.ARCHITECTURES), how
