"""Arguments of blocks that are sharded like the residual stream."""

import pytest

from tests import zoo
from titanplans import PlanError, registered_plans
from titanplans.plan.degrees import Degrees
from titanplans.proof import verify


class Unsharded(registered_plans()["gemma4_text"]):
    """Blocks get the per-layer inputs of all tokens."""

    def layer_plan(self, layer):
        return {name: style for name, style in super().layer_plan(layer).items() if name}


class Misnamed(registered_plans()["gemma4_text"]):
    def layer_plan(self, layer):
        return super().layer_plan(layer) | {"": self.stream_arguments("per_layer_inputs")}


@pytest.mark.parametrize("degrees", [Degrees(tp=2), Degrees(cp=2), Degrees(tp=2, cp=2)], ids=str)
def test_arguments_have_the_tokens_of_the_hidden_states(degrees):
    report = verify(
        lambda: zoo.build("gemma4_text"),
        degrees=[degrees],
        loss_parallel=True,
        sequence_parallel=True,
        conditions="plain",
    )
    assert report.passed, report.table()


def test_a_plan_without_it_does_not_run():
    report = verify(
        lambda: zoo.build("gemma4_text"),
        Unsharded,
        degrees=[2],
        loss_parallel=True,
        sequence_parallel=True,
        conditions="plain",
    )
    assert not report.passed
    assert "runs in model.layers.0" in report.table()


def test_an_argument_that_blocks_do_not_have_is_refused():
    with pytest.raises(
        PlanError,
        match=r"its forward has no argument per_layer_inputs; it has hidden_states, per_layer_input",
    ):
        verify(lambda: zoo.build("gemma4_text"), Misnamed, degrees=[2], conditions="plain")
