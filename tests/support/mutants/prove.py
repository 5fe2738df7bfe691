"""Verdicts on mutants: refused by the plan's checks, or judged by the proof."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tests.support.mutants.corpus import Mutant
from titanplans import PlanError, check_plan
from titanplans.proof.batches.conditions import PLAIN
from titanplans.proof.case import prove_case
from titanplans.proof.ranks import threads
from titanplans.proof.ranks.world import World
from titanplans.proof.result import CaseResult, keywords

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Verdict:
    """A mutant, and either the message of its refusal or the case that was proved."""

    mutant: Mutant
    refusal: str | None
    case: CaseResult | None

    @property
    def survived(self) -> bool:
        return self.case is not None and self.case.passed

    def messages(self) -> list[str]:
        """Return the texts that a user would see."""
        if self.refusal is not None:
            return [self.refusal]
        assert self.case is not None
        return [self.case.worst, str(self.case.finding), *self.case.notes]


def verdicts(mutants: Sequence[Mutant]) -> Iterator[Verdict]:
    """Prove the mutants of one architecture.

    Mutants with the same degree run in one world. If several mutants have the same effect, only one is proved.
    """
    by_effect: dict[object, list[Mutant]] = {}
    for mutant in mutants:
        if (refusal := _refused(mutant)) is not None:
            yield Verdict(mutant, refusal, None)
        else:
            by_effect.setdefault(mutant.effect, []).append(mutant)
    for degree, of_degree in itertools.groupby(
        by_effect.values(), key=lambda group: group[0].options.degrees.tp
    ):
        groups = list(of_degree)
        for group, verdict in zip(groups, _over_threads(degree, [group[0] for group in groups]), strict=True):
            yield from (replace(verdict, mutant=mutant) for mutant in group)


def _refused(mutant: Mutant) -> str | None:
    options = mutant.options
    try:
        model = mutant.architecture.reference().pristine
        check_plan(model, options.degrees, plan=mutant.plan, **keywords(options))
    except PlanError as error:
        return str(error)
    return None


def _over_threads(degree: int, mutants: list[Mutant]) -> list[Verdict]:
    def prove(world: World) -> list[Verdict]:
        return [_verdict(mutant, world) for mutant in mutants]

    return threads.run(degree, CPU, prove)


def _verdict(mutant: Mutant, world: World) -> Verdict:
    reference = mutant.architecture.reference()
    try:
        case = prove_case(reference, mutant.plan, mutant.options, PLAIN, world)
    except PlanError as error:
        return Verdict(mutant, str(error), None)
    return Verdict(mutant, None, case)
