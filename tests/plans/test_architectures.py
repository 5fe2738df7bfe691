"""Every registered plan proved with every combination of options: at tp 8 at even sizes, some at tp 4 at odd ones.

Exhaustively, both of all at 2, 4 and 8.
"""

from functools import partial

import pytest
import zoo
from plainly import verify

from titanplans import kernels, registered_plans
from titanplans.modeling.samples import build_real, sample_inputs


@pytest.fixture(autouse=True, scope="module")
def cpu_kernels():
    kernels.install("cpu")


def prove(name, *, seq_len=16, degrees=None, **overrides):
    config = zoo.config(name, **overrides)
    inputs = sample_inputs(config, batch_size=2, seq_len=seq_len, seed=0)
    options = {} if degrees is None else {"degrees": degrees}
    report = verify(partial(build_real, config), inputs=inputs, **options)
    assert report.passed, report.table()
    return report


def test_every_registered_plan_is_in_the_zoo():
    own = {
        name for name, plan in registered_plans().items() if plan.__module__.startswith("titanplans.plans.")
    }
    assert own == {*zoo.ARCHITECTURES, *zoo.FAMILIES}


@pytest.mark.parametrize("degrees", [(8,), pytest.param((2, 4), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_equal_to_the_whole_model(name, degrees):
    report = prove(name, degrees=degrees)
    assert [case.options.degree for case in report.cases] == [d for d in degrees for _ in range(4)]
    assert not report.refused


ODD = ("transformer", "gla", "mistral")
"""The others' plans are proved at odd sizes, at tp 2 and 4, in tests/proof/test_worlds.py."""


@pytest.mark.parametrize("degrees", [(4,), pytest.param((2, 8), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ODD else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in zoo.ARCHITECTURES
        if name != "gemma3"
    ],
)
def test_sizes_that_the_degree_does_not_divide(name, degrees):
    prove(name, **zoo.ODD, seq_len=19, degrees=degrees)


def test_images_across_shards_of_an_odd_sequence():
    prove("gemma3", intermediate_size=45, seq_len=19, degrees=[4])


def test_qwen3_with_twice_as_many_ranks_as_key_value_heads():
    # Qwen3-0.6B's heads.
    prove("qwen3", num_attention_heads=16, head_dim=4, num_hidden_layers=1, degrees=[16])


def test_gemma3_with_one_key_value_head():
    prove("gemma3_text", num_attention_heads=4, num_key_value_heads=1, degrees=[4])  # Gemma3-1B's
