"""Every single-style mutant of the registered plans: refused, killed and placed, or listed with the reason why not.

What is made is said in tests/support/mutants: the models in architectures.py, the mistakes in operators.py, what counts
as the right module in place.py, what may survive in equivalent.py. That the plans
themselves are right, over the same ranks, is test_threads.py's.
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
"""How many mutants there are, and how many of them are equivalent: README has the sums. Fewer would mean that operators
no longer find what they change."""


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_every_mutant_is_rejected_at_the_right_place_or_equivalent(architecture):
    results = list(verdicts(corpus()[architecture]))
    accepted = [str(v.mutant) for v in results if v.survived and equivalence(v.mutant) is None]
    assert not accepted, f"wrong plans that were accepted: {accepted}"
    wronged = [(str(v.mutant), v.messages()) for v in results if not v.survived and equivalence(v.mutant)]
    assert not wronged, f"listed as equivalent, but rejected: {wronged}"
    misplaced = [(str(v.mutant), v.messages()) for v in results if not v.survived and not is_right(v)]
    assert not misplaced, f"rejected at the wrong place: {misplaced}"
    equivalent = sum(equivalence(v.mutant) is not None for v in results)
    assert (len(results), equivalent) == COUNTS[architecture.name]


def test_every_registered_plan_has_its_mutants():
    shared = {"mistral": "llama"}  # one class
    plans = registered_plans()
    own = {name: plan for name, plan in plans.items() if plan.__module__.startswith("titanplans.plans.")}
    assert own.keys() - shared.keys() - zoo.FAMILIES.keys() == {a.name for a in ARCHITECTURES}
    for name, other in shared.items():
        assert plans[name] is plans[other]


def test_every_equivalence_is_one_of_the_corpus():
    everyone = [mutant for made in corpus().values() for mutant in made]
    unused = [row for row in EQUIVALENT if not any(row.covers(mutant) for mutant in everyone)]
    assert not unused, unused
