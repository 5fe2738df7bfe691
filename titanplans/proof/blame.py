"""Which conditions a failing case needs to be wrong, and where it goes wrong under those alone."""

from collections.abc import Callable
from dataclasses import replace

from titanplans.errors import PlanError
from titanplans.plan.plan import TPOptions
from titanplans.proof.conditions import Scenario, simpler, words
from titanplans.proof.report import CaseResult

Prove = Callable[[TPOptions, Scenario], CaseResult]
"""Proves one case, and searches it for the place where it goes wrong."""


class Blame:
    """Explains failing cases, one after the other: what explained one is tried first on the next.

    Args:
        prove: proves one case.
        plain: what every condition is held against.
    """

    def __init__(self, prove: Prove, plain: Scenario):
        self.prove, self.plain = prove, plain
        self.known: list[Scenario] = [plain]

    def explain(self, case: CaseResult) -> CaseResult:
        """Return the simplest case that fails as `case` does, under its name, with the conditions that it needs."""
        found: dict[Scenario, CaseResult] = {}

        def fails(scenario: Scenario) -> bool:
            try:
                result = self.prove(case.options, scenario)
            except PlanError:
                return False  # the whole model does not take these conditions without the others
            if not result.passed:
                found[scenario] = result
            return not result.passed

        simplest = next(filter(fails, self.known), None)
        if simplest is None:
            simplest = simpler(case.scenario, self.plain, fails)
            self.known.append(simplest)
        if simplest not in found and not fails(simplest):
            return case  # nothing simpler fails, and it did not again: what it said first stands
        return replace(found[simplest], scenario=case.scenario, conditions=words(simplest, self.plain))
