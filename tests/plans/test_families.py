"""The plans of all families in `zoo.FAMILIES`, proved with each variant of their options at tp 2 and 4."""

import pytest
import torch
import zoo
from plainly import verify

from titanplans import PlanError, check_plan, kernels, modeling
from titanplans.modeling.samples import build_real, sample_inputs

VARIANTS = [(name, number) for name, variants in zoo.FAMILIES.items() for number in range(len(variants))]


@pytest.fixture(autouse=True, scope="module")
def cpu_kernels():
    kernels.install("cpu")


@pytest.mark.parametrize(("name", "number"), VARIANTS, ids=lambda value: str(value))
def test_equal_to_the_whole_model(name, number):
    """At every degree both with a sharded loss and sequence, and with neither; exhaustively, every choice of them."""
    config = modeling.load_config(name, "debug", **zoo.FAMILIES[name][number])
    inputs = sample_inputs(config, batch_size=2, seq_len=16, seed=0)
    for both in (True, False):
        report = verify(
            lambda: build_real(config),
            inputs=inputs,
            degrees=[2, 4],
            loss_parallel=both,
            sequence_parallel=both,
        )
        assert report.passed, report.table()
        assert len(report.cases) == 2
        assert not report.refused


def test_raven_is_refused_with_random_numbers_for_each_head():
    with torch.device("meta"):
        model = modeling.build(modeling.load_config("raven", "debug", add_gumbel_noise=True))
    with pytest.raises(PlanError, match=r"ranks that draw alike give their heads the same ones.* = False"):
        check_plan(model, 2)


def test_deltaformer_is_refused_with_fewer_heads_of_keys():
    """The kernel of flash-linear-attention asserts it, and a whole model fails, too."""
    with torch.device("meta"):
        model = modeling.build(modeling.load_config("deltaformer", "debug", num_kv_heads=2))
    with pytest.raises(
        PlanError, match=r"num_kv_heads = 2 with num_heads = 8: .*: set num_kv_heads = num_heads"
    ):
        check_plan(model, 2)
