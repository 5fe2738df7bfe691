"""Every row of tests/support/plan_proofs.py is proved."""

import pytest

from tests import zoo
from tests.support import plan_proofs
from titanplans import registered_plans
from titanplans.config.families import families
from titanplans.plan.degrees import Degrees
from titanplans.proof import verify
from titanplans.split.experts.interfaces import interface_of


def marks(row):
    names = ["exhaustive"] * row.exhaustive + ["thorough"] * row.thorough
    return [getattr(pytest.mark, name) for name in names]


ROWS = [pytest.param(row, id=row.id, marks=marks(row)) for row in plan_proofs.rows()]


@pytest.mark.parametrize("row", ROWS)
def test_the_split_model_trains_as_the_unsplit_one(row):
    report = row.prove()
    assert report.passed, report.table()
    assert not report.refused
    if row.conditions == "plain":
        choices = (row.loss is None) + (row.sequence is None)
        assert len(report.cases) == len(row.degrees) * 2**choices


@pytest.mark.thorough
@pytest.mark.parametrize("name", zoo.FURTHER)
def test_a_plan_of_common_styles_splits_its_model_in_each_way(name):
    """One plain step for each way to split. `titanplans verify --all` proves these plans in all conditions."""
    model = zoo.build(name)
    ways = [Degrees(tp=2), Degrees(tp=4), Degrees(cp=2)]
    if name != "gemma4_text":  # its last blocks use keys of earlier ones, which another stage does not have
        ways.append(Degrees(tp=2, pp=2))
    if any(interface_of(module) for module in model.modules()):
        ways.append(Degrees(tp=2, ep=2))

    def build():
        # A load-balancing loss is refused in a pipeline.
        return zoo.build(
            name, **({"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {})
        )

    report = verify(build, degrees=ways, loss_parallel=True, sequence_parallel=True, conditions="plain")
    assert report.passed, report.table()
    assert not report.refused


def test_every_registered_plan_is_in_the_zoo():
    shipped = {
        name for name, plan in registered_plans().items() if plan.__module__.startswith("titanplans.plans.")
    }
    assert shipped == {*zoo.ARCHITECTURES, *zoo.BESIDES}
    assert shipped == set(families()), (
        "unknown plan names are refused by the list of families, without an import"
    )
    assert shipped - zoo.FURTHER.keys() == {row.name for row in plan_proofs.rows() if not row.exhaustive}
    assert plan_proofs.QUICK.items() <= {
        (row.name, row.variant) for row in plan_proofs.rows() if not row.exhaustive
    }
