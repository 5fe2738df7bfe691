"""Packed projections whose sections the degree does not divide: the last rank has fewer rows of each section, but at least
one."""

import pytest
from torch import nn

from tests import zoo
from tests.support import plan_examples
from tests.support.plain_proofs import verify_sharded
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import Degrees, PlanError, check_plan
from titanplans.adapters.add import add_adapters
from titanplans.modeling.samples import build_real
from titanplans.parallel import LoRA


def phi3(**fields):
    return build_real(zoo.config("phi3", intermediate_size=37, **fields))


def with_adapters():
    model = phi3()
    add_adapters(model, LoRA(rank=4))
    return model


def experts():
    """Return a model with three-dimensional expert weights, sharded along other dimensions, and replicated biases."""
    model = Tiny()
    for layer in model.layers:
        layer.mlp = plan_examples.Experts(width=7)
    return model


def olmoe():
    model = build_real(zoo.config("olmoe", intermediate_size=13))
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("model", "plan"),
    [(phi3, None), (with_adapters, None), (experts, plan_examples.ExpertsPlan), (olmoe, None)],
)
def test_packed_projections_train_as_the_unsplit_model(model, plan):
    report = verify_sharded(model, plan, degrees=[2, 4])
    assert report.passed, report.table()
    assert len(report.cases) == 2


def test_ranks_without_rows_are_refused():
    with pytest.raises(PlanError, match=r"degree = 8 leaves .*section 1 of its rows = 9 .* 16"):
        check_plan(build_real(zoo.config("phi3", intermediate_size=9)), Degrees(tp=8))


class NormMLP(nn.Module):
    """An MLP with a norm over its width."""

    def __init__(self, width):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, width), nn.Linear(width, 16)
        self.norm = nn.RMSNorm(width)

    def forward(self, x):
        return self.down_proj(self.norm(self.up_proj(x)))


def norm_plan(style):
    class Plan(TinyPlan):
        mlp_in = ("up_proj",)

        def mlp_plan(self, mlp):
            return {**super().mlp_plan(mlp), "norm": getattr(self, style)()}

    return Plan


@pytest.mark.parametrize("style", ["split_norm", "gathered_in_region"])
def test_a_norm_over_a_width_needs_equal_shards(style):
    """Each rank assumes that the other ranks' shards are as wide as its own."""
    message = r"degree = 4 does not divide dimension 0 of \w+ = 10 .* 1 or 2 would work"
    with pytest.raises(PlanError, match=message):
        check_plan(plan_examples.with_mlp(lambda: NormMLP(10)), Degrees(tp=4), plan=norm_plan(style))
    report = verify_sharded(
        lambda: plan_examples.with_mlp(lambda: NormMLP(12)), norm_plan(style), degrees=[2, 4]
    )
    assert report.passed, report.table()
