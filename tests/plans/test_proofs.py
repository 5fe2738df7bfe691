"""Every row of tests/support/plan_proofs.py is proved."""

import pytest

from tests import zoo
from tests.support import plan_proofs
from titanplans import registered_plans
from titanplans.config.families import families


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


def test_every_registered_plan_is_in_the_zoo():
    shipped = {
        name for name, plan in registered_plans().items() if plan.__module__.startswith("titanplans.plans.")
    }
    assert shipped == {*zoo.ARCHITECTURES, *zoo.FAMILIES}
    assert shipped == set(families()), (
        "unknown plan names are refused by the list of families, without an import"
    )
    assert shipped == {row.name for row in plan_proofs.rows() if not row.exhaustive}
    assert plan_proofs.QUICK.items() <= {
        (row.name, row.variant) for row in plan_proofs.rows() if not row.exhaustive
    }
