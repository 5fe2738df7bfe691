"""Every single-style mutant of the registered plans: refused, killed and placed, or listed with the reason why not.

What is made is said in tests/mutants: the models in architectures.py, the mistakes in operators.py, what counts
as the right module in place.py, what may survive in equivalent.py.
"""

from collections import Counter

import pytest
from mutants.architectures import ARCHITECTURES
from mutants.corpus import corpus, mutants
from mutants.equivalent import EQUIVALENT, equivalence
from mutants.place import named, right
from mutants.prove import CPU, simulate, verdicts
from mutants.tally import TALLY

from titanplans import TPOptions, registered_plans
from titanplans.proof import threads
from titanplans.proof.case import prove_cases

LEAST = {
    "transformer": 228,
    "gla": 105,
    "llama": 153,
    "qwen2": 28,
    "qwen3": 18,
    "gemma3_text": 40,
    "gemma3": 117,
}
"""How many mutants there are at least: fewer would mean that operators no longer find what they change."""


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_every_mutant_is_rejected_at_the_right_place_or_equivalent(architecture):
    results = list(verdicts(corpus()[architecture]))
    counts = Counter(
        "refused" if v.refusal is not None else "survived" if v.survived else "killed" for v in results
    )
    listed = sum(equivalence(v.mutant) is not None for v in results)
    TALLY.add(
        architecture.name,
        made=len(results),
        refused=counts["refused"],
        killed=counts["killed"],
        equivalent=listed,
    )
    accepted = [str(v.mutant) for v in results if v.survived and equivalence(v.mutant) is None]
    assert not accepted, f"wrong plans that were accepted: {accepted}"
    wronged = [(str(v.mutant), v.said()) for v in results if not v.survived and equivalence(v.mutant)]
    assert not wronged, f"listed as equivalent, but rejected: {wronged}"
    misplaced = [(str(v.mutant), v.said()) for v in results if not v.survived and not right(v)]
    assert not misplaced, f"rejected at the wrong place: {misplaced}"
    assert len(results) >= LEAST[architecture.name]


def test_every_registered_plan_has_its_mutants():
    shared = {"mistral": "llama"}  # one class
    plans = registered_plans()
    own = {name: plan for name, plan in plans.items() if plan.__module__.startswith("titanplans.plans.")}
    assert own.keys() - shared.keys() == {architecture.name for architecture in ARCHITECTURES}
    for name, other in shared.items():
        assert plans[name] is plans[other]


def test_every_equivalence_is_one_of_the_corpus():
    everyone = [mutant for made in corpus().values() for mutant in made]
    unused = [row for row in EQUIVALENT if not any(row.covers(mutant) for mutant in everyone)]
    assert not unused, unused


@pytest.mark.parametrize("degree", [2, 4])
def test_the_plans_themselves_are_right_over_threads(degree):
    """Otherwise their mutants would be killed for nothing."""

    def work(world):
        return [
            (architecture.name, case)
            for architecture in ARCHITECTURES
            for case in prove_cases(
                architecture.reference(),
                None,
                [TPOptions(degree, True, sequence_parallel) for sequence_parallel in (True, False)],
                lambda work: work(world),
                find=True,
                tell=lambda words: None,
            )
        ]

    for architecture in ARCHITECTURES:
        architecture.reference()  # made here, not by every rank
    wrong = [(name, case.worst) for name, case in threads.run(degree, CPU, work) if not case.passed]
    assert not wrong


SAMPLE = (
    ("entry_unsummed", "self_attn"),
    ("unreduced", "input_layernorm"),
    ("shift_one", "q_proj"),
    ("on_other_stream", "mlp"),
    ("other_loss", "lm_head"),
)


def test_threads_and_simulated_ranks_agree():
    """The corpus is proved over threads; simulated ranks give the same verdicts at the same places."""
    llama = next(architecture for architecture in ARCHITECTURES if architecture.name == "llama")
    chosen = [
        next(m for m in mutants(llama) if m.operator == operator and m.key.endswith(key))
        for operator, key in SAMPLE
    ]
    for threaded in verdicts(chosen):
        simulated = simulate(threaded.mutant)
        assert simulated.survived == threaded.survived, threaded.mutant
        if not simulated.survived:
            model = llama.reference().pristine
            assert named(simulated.case, model) == named(threaded.case, model), threaded.mutant
            assert {c.what for c in simulated.case.checks if not c.passed} == {
                c.what for c in threaded.case.checks if not c.passed
            }
