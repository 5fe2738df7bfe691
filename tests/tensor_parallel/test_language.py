"""Each word of the plan language proves right at two degrees, and says what to write where it is misused."""

import pytest
from language import (
    Balanced,
    Bounded,
    BoundedPlan,
    Experts,
    ExpertsPlan,
    Packed,
    PackedPlan,
    Retention,
    RetentionPlan,
    Selective,
    SelectivePlan,
    StateSpace,
    StateSpacePlan,
    WholePlan,
    with_mixer,
    with_mlp,
)
from plainly import verify
from tiny import Tiny


def balanced():
    model = Balanced()
    for layer in model.layers:
        layer.mlp = Experts()
    return model


RIGHT = {
    "packed state space": (lambda: with_mixer(StateSpace), StateSpacePlan),
    "packed transposed": (lambda: with_mixer(Packed), PackedPlan),
    "sum in the region": (lambda: with_mixer(Selective), SelectivePlan),
    "function of a head's number": (lambda: with_mixer(Retention), RetentionPlan),
    "whole mixer": (Tiny, WholePlan),
    "experts": (lambda: with_mlp(Experts), ExpertsPlan),
    "balance of experts": (balanced, ExpertsPlan),
    "what the model holds": (Bounded, BoundedPlan),
}


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_right(name):
    model, plan = RIGHT[name]
    # The model's own sum with the logits takes no shards of them.
    loss = False if name == "balance of experts" else None
    report = verify(model, plan, degrees=[2, 4], loss_parallel=loss)
    assert report.passed, str(report.table())
    assert len(report.cases) == (8 if loss is None else 4)
    gradients = (check for case in report.cases for check in case.checks if check.what == "gradients")
    assert max(check.error for check in gradients) < 10  # of some hundred that the bound allows
