"""Every single-style mutant of the registered plans: refused, or rejected with its module named, or listed as equivalent.

The mutants are made in tests/support/mutants: models in architectures.py, faults in operators.py; place.py has the modules
that a verdict may name, equivalent.py the mutants that may survive. test_threads.py proves the correct plans.
"""

import pytest

from tests import zoo
from tests.support.mutants.architectures import ARCHITECTURES
from tests.support.mutants.corpus import corpus
from tests.support.mutants.equivalent import EQUIVALENT, equivalence
from tests.support.mutants.place import is_right
from tests.support.mutants.prove import verdicts
from titanplans import registered_plans

pytestmark = pytest.mark.thorough

COUNTS = {
    "transformer": (228, 19),
    "gla": (105, 2),
    "llama": (153, 9),
    "qwen2": (28, 3),
    "qwen3": (18, 3),
    "gemma3_text": (38, 2),
    "gemma3": (130, 13),
}
"""The counts of mutants and of equivalent mutants; docs/plans.md has their sums. If a count falls, an operator may no longer
apply."""


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_every_mutant_is_rejected_at_the_right_module_or_equivalent(architecture):
    results = list(verdicts(corpus()[architecture]))
    accepted = [str(v.mutant) for v in results if v.survived and equivalence(v.mutant) is None]
    assert not accepted, f"wrong plans that were accepted: {accepted}"
    rejected = [(str(v.mutant), v.messages()) for v in results if not v.survived and equivalence(v.mutant)]
    assert not rejected, f"listed as equivalent, but rejected: {rejected}"
    misplaced = [(str(v.mutant), v.messages()) for v in results if not v.survived and not is_right(v)]
    assert not misplaced, f"rejected, but another module named: {misplaced}"
    equivalent = sum(equivalence(v.mutant) is not None for v in results)
    assert (len(results), equivalent) == COUNTS[architecture.name]


def test_every_registered_plan_has_its_mutants():
    same_class = {"mistral": "llama"}  # one class
    plans = registered_plans()
    shipped = {name: plan for name, plan in plans.items() if plan.__module__.startswith("titanplans.plans.")}
    assert shipped.keys() - same_class.keys() - zoo.BESIDES == {a.name for a in ARCHITECTURES}
    for name, registered_as in same_class.items():
        assert plans[name] is plans[registered_as]


def test_every_equivalence_is_one_of_the_corpus():
    all_mutants = [mutant for mutants in corpus().values() for mutant in mutants]
    unused = [
        equivalence
        for equivalence in EQUIVALENT
        if not any(equivalence.covers(mutant) for mutant in all_mutants)
    ]
    assert not unused, unused
