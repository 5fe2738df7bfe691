"""Every registered architecture, compiled on two gloo ranks: the losses of eager mode, by compiled code.

Inductor makes kernels of two; exhaustively, of every one.
"""

import functools

import compiled
import pytest
import worlds
import zoo


@pytest.fixture(
    scope="module",
    params=[compiled.KERNELS, pytest.param(tuple(zoo.ARCHITECTURES), marks=pytest.mark.exhaustive)],
    ids=["kernels of two", "kernels of all"],
)
def results(request):
    return worlds.run(functools.partial(compiled.run, inductor=request.param), 2)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_losses_and_norms_are_those_of_eager_mode(results, name):
    # float32: inductor's sums run in another order, an epsilon (1.2e-7) or two a step; AdamW divides
    # by the gradient's size, which makes more of it where a gradient is all rounding. A dropped sum is off by 1e-2.
    for found, expected in zip(results[name].compiled, results[name].eager, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
    losses = [loss for loss, _ in results[name].eager]
    assert len(set(losses)) == compiled.STEPS


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_block_ran_what_was_compiled_once(results, name):
    result = results[name]
    assert len(result.calls) == 2 + (name == "gemma3"), "two blocks, and one of the vision tower"
    assert set(result.calls.values()) == {compiled.STEPS}
    made = sum(block.graphs for block in result.blocks)
    assert result.graphs[0] == made + 1 > 1, "those of the blocks, and the loss"
    # The graph that hands FLA's swiglu a weight is compiled once more: torch has marked the weight's local tensor as
    # requiring a gradient by then.
    again = 1 if any("SwiGLULinear" in block.breaks for block in result.blocks) else 0
    assert result.graphs[1] <= made + 1 + again
    assert result.graphs[2] == result.graphs[1], "compiled again after the second step"


@pytest.mark.parametrize("name", compiled.LENGTHENED)
def test_another_length_is_compiled_once_and_then_any(results, name):
    first, second, third = results[name].lengths
    assert first < second <= 2 * first
    assert third == second


def test_the_page_has_these_graphs_and_breaks(results):
    written = compiled.written(compiled.PAGE.read_text())
    assert written == compiled.table(results), "PYTHONPATH=. python tests/compiled.py --page writes it"
