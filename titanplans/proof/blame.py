"""Which conditions a failing case needs to be wrong, and where it goes wrong under those alone.

By delta debugging (Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input"): one condition after
the other is taken from the case, and stays away if the case is still wrong without it.
"""

from collections.abc import Callable
from dataclasses import replace

from titanplans.proof.conditions import Scenario, simpler, words
from titanplans.proof.report import CaseResult
from titanplans.tensor_parallel.plan import TPOptions

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
        self.known: list[Scenario] = []

    def explain(self, case: CaseResult) -> CaseResult:
        """Return the simplest case that fails as `case` does, under its name, with the conditions that it needs."""
        for scenario in (self.plain, *self.known):
            result = self.prove(case.options, scenario)
            if not result.passed:
                break
        else:
            result = self._simplest(case)
            self.known.append(result.scenario)
        return replace(result, scenario=case.scenario, conditions=words(result.scenario, self.plain))

    def _simplest(self, case: CaseResult) -> CaseResult:
        simplest = self.prove(case.options, case.scenario)
        while True:
            for scenario in simpler(simplest.scenario, self.plain):
                result = self.prove(case.options, scenario)
                if not result.passed:
                    simplest = result
                    break
            else:
                return simplest
