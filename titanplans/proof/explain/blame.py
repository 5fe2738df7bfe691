"""Find the conditions that a failing case needs, and its first wrong tensor with only these conditions. Start at
`Blame`."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from titanplans.errors import PlanError
from titanplans.plan.options import TPOptions
from titanplans.proof.batches.conditions import MicroBatch, Scenario, words
from titanplans.proof.result import CaseResult

T = TypeVar("T")

Prove = Callable[[TPOptions, Scenario], CaseResult]
"""Proves one case with a recorded reference, so that its result names the first wrong tensor."""


class Blame:
    """Explains failing cases one by one.

    Args:
        prove: proves one case.
        plain: the scenario without conditions.
    """

    def __init__(self, prove: Prove, plain: Scenario):
        self.prove, self.plain = prove, plain
        # Each scenario that explained a case is tried on the next ones first, since faults often have the same cause.
        self._explanations: list[Scenario] = [plain]

    def explain(self, case: CaseResult) -> CaseResult:
        """Return `case` with the conditions that it needs to fail, and its first wrong tensor with only these
        conditions."""
        failures: dict[Scenario, CaseResult] = {}

        def fails(scenario: Scenario) -> bool:
            try:
                result = self.prove(case.options, scenario)
            except PlanError:
                return False  # the unsplit model does not run under these conditions alone
            if not result.passed:
                failures[scenario] = result
            return not result.passed

        simplest = next(filter(fails, self._explanations), None)
        if simplest is None:
            simplest = simpler(case.scenario, self.plain, fails)
            self._explanations.append(simplest)
        if simplest not in failures and not fails(simplest):
            return case  # the failure can't be reproduced, so the first result is reported
        failure = failures[simplest]
        conditions = words(simplest, self.plain)
        # Report the differences of the case itself. If it did not run, it has none, and the recorded run names the module.
        has_not_run = all(result.checks[0].what == "runs" for result in (case, failure))
        checks = failure.checks if has_not_run else case.checks
        return replace(
            case, checks=checks, finding=failure.finding, notes=failure.notes, conditions=conditions
        )


def simpler(scenario: Scenario, plain: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Return a scenario that still fails, with fewer of the conditions of `scenario`; makes one pass over the conditions.

    Delta debugging (Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input"): conditions are
    removed one by one, the largest first, and stay removed if the rest still fails.

    Args:
        scenario: a scenario that fails.
        plain: the scenario without conditions.
        fails: proves a scenario, and returns whether it fails.
    """

    def try_instead(candidate: Scenario) -> bool:
        nonlocal scenario
        if candidate == scenario or not fails(candidate):
            return False
        scenario = candidate
        return True

    batches = dict.fromkeys(itertools.chain(*scenario.steps))
    if sum(map(len, scenario.steps)) > 1 and not any(
        try_instead(replace(scenario, steps=((batch,),))) for batch in batches
    ):
        for at in reversed(range(len(scenario.steps))):
            if len(scenario.steps) > 1:
                try_instead(replace(scenario, steps=_without(scenario.steps, at)))
        for at, step in enumerate(scenario.steps):
            for batch_at in reversed(range(len(step))):
                if len(remaining := scenario.steps[at]) > 1:
                    steps = (*scenario.steps[:at], _without(remaining, batch_at), *scenario.steps[at + 1 :])
                    try_instead(replace(scenario, steps=steps))
    for name, value in _settings(plain):
        if name != "steps":
            try_instead(replace(scenario, **{name: value}))  # type: ignore[arg-type]
    any(try_instead(replace(scenario, evaluated=(batch,))) for batch in scenario.evaluated)
    for name, value in _settings(plain.steps[0][0]):
        try_instead(replace(scenario, steps=tuple(_set(step, name, value) for step in scenario.steps)))
        try_instead(replace(scenario, evaluated=_set(scenario.evaluated, name, value)))
    return scenario


def _set(batches: tuple[MicroBatch, ...], name: str, value: Any) -> tuple[MicroBatch, ...]:
    return tuple(replace(batch, **{name: value}) for batch in batches)


def _without(items: tuple[T, ...], at: int) -> tuple[T, ...]:
    return items[:at] + items[at + 1 :]


def _settings(conditions: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(conditions, field.name)) for field in fields(conditions))
