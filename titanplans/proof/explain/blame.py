"""Which conditions a failing case needs, and where its error is under those alone."""

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
"""Proves one case, and locates its error."""


class Blame:
    """Explains failing cases one by one, and tries the last explanation on the next case first.

    `plain` is the scenario without conditions.
    """

    def __init__(self, prove: Prove, plain: Scenario):
        self.prove, self.plain = prove, plain
        self.known: list[Scenario] = [plain]

    def explain(self, case: CaseResult) -> CaseResult:
        """Return `case` with the conditions that it needs, and the place where it is wrong under these alone."""
        found: dict[Scenario, CaseResult] = {}

        def fails(scenario: Scenario) -> bool:
            try:
                result = self.prove(case.options, scenario)
            except PlanError:
                return False  # the whole model refuses these conditions without the others
            if not result.passed:
                found[scenario] = result
            return not result.passed

        simplest = next(filter(fails, self.known), None)
        if simplest is None:
            simplest = simpler(case.scenario, self.plain, fails)
            self.known.append(simplest)
        if simplest not in found and not fails(simplest):
            return case  # neither anything simpler fails nor the case again: its first result stands
        shown = found[simplest]
        needed = words(simplest, self.plain)
        # Figures stay those of the case. One that does not run has none, and only a recorded training names the module.
        breaks = all(one.checks[0].what == "runs" for one in (case, shown))
        checks = shown.checks if breaks else case.checks
        return replace(case, checks=checks, finding=shown.finding, notes=shown.notes, conditions=needed)


def simpler(scenario: Scenario, plain: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Return a scenario that fails as `scenario` does, with as few conditions as one pass over them finds.

    By delta debugging (Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input"): conditions are
    removed one by one, the largest first, and stay removed if the rest still fails.
    """

    def take(candidate: Scenario) -> bool:
        nonlocal scenario
        if candidate == scenario or not fails(candidate):
            return False
        scenario = candidate
        return True

    batches = dict.fromkeys(itertools.chain(*scenario.steps))
    if sum(map(len, scenario.steps)) > 1 and not any(
        take(replace(scenario, steps=((batch,),))) for batch in batches
    ):
        for at in reversed(range(len(scenario.steps))):
            if len(scenario.steps) > 1:
                take(replace(scenario, steps=_without(scenario.steps, at)))
        for at, step in enumerate(scenario.steps):
            for left in reversed(range(len(step))):
                if len(one := scenario.steps[at]) > 1:
                    steps = (*scenario.steps[:at], _without(one, left), *scenario.steps[at + 1 :])
                    take(replace(scenario, steps=steps))
    for name, value in _settings(plain):
        if name != "steps":
            take(replace(scenario, **{name: value}))  # type: ignore[arg-type]
    any(take(replace(scenario, evaluated=(batch,))) for batch in scenario.evaluated)
    for name, value in _settings(plain.steps[0][0]):
        take(replace(scenario, steps=tuple(_set(step, name, value) for step in scenario.steps)))
        take(replace(scenario, evaluated=_set(scenario.evaluated, name, value)))
    return scenario


def _set(batches: tuple[MicroBatch, ...], name: str, value: Any) -> tuple[MicroBatch, ...]:
    return tuple(replace(batch, **{name: value}) for batch in batches)


def _without(items: tuple[T, ...], at: int) -> tuple[T, ...]:
    return items[:at] + items[at + 1 :]


def _settings(thing: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(thing, field.name)) for field in fields(thing))
