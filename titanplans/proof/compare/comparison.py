"""One case: the split model's training is compared with the whole one's, quantity by quantity."""

import math
from dataclasses import dataclass, field

import torch

from titanplans.plan.options import TPOptions
from titanplans.proof.batches.conditions import Scenario
from titanplans.proof.compare.pipeline import PipelinedModel
from titanplans.proof.compare.reference import Point, ReferenceRun
from titanplans.proof.compare.tolerance import difference, largest
from titanplans.proof.compare.training import Key, TrainingRun
from titanplans.proof.ranks.world import World, full_tensors
from titanplans.proof.result import CaseResult, Check
from titanplans.split.gradients import local_of


@dataclass
class Comparison:
    """Compares a split model's training with the `reference`'s as it goes.

    Attributes:
        worst: for each kind of quantity the check nearest to its tolerance, or farthest beyond it.
        missing: gradients of the whole model that the split one lacks.
        unexpected: gradients of the split model that the whole one lacks.
    """

    reference: ReferenceRun
    world: World
    worst: dict[str, Check] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def run(self, training: TrainingRun) -> None:
        """Compare at every point of `training`, until the end of the first step with a difference."""
        for point, found in training.points():
            with torch.no_grad():
                for key, values in zip(found, full_tensors([*found.values()], self.world), strict=True):
                    self._compare(point, key, values)
            if ("norm", "") in found:
                self._compare_names(point, found)
                # Later points would differ for that alone, except the weights after an only step.
                if len(training.script.steps) > 1 and not self.world.gather_objects(self.passed)[0]:
                    break
        self._compare_ties(training)

    @property
    def passed(self) -> bool:
        """Whether all quantities so far are right."""
        return all(check.passed for check in self.worst.values()) and not self.missing and not self.unexpected

    @property
    def _allowed(self) -> float:
        return self.reference.tolerance.allowed(self.world.mesh.size())

    def _note(self, what: str, error: float, tolerance: float, where: str, point: str) -> None:
        check, before = Check(what, error, tolerance, where, point), self.worst.get(what)
        if before is None or (
            before.passed and (not check.passed or check.relative_error > before.relative_error)
        ):
            self.worst[what] = check

    def _compare(self, point: str, key: Key, values: list[torch.Tensor]) -> None:
        at: Point = (point, *key)
        if not self.world.is_first or at not in self.reference.expected:
            return
        (what, where), (first, *others) = key, values
        others = [value for value in others if not _same(value, first)]
        apart, expected = self.reference.tolerance.difference, self.reference.expected[at]
        error = max(apart(value, expected) for value in (first, *others)) / self.reference.units[at]
        if self.reference.tolerance.compares(what) or not math.isfinite(error):
            self._note(what, error, self._allowed, where, point)
        unit = torch.finfo(first.dtype).eps * largest(first)
        worst = max((difference(value, first) for value in others), default=0.0)
        error = worst / unit if unit else worst and math.inf
        self._note("replicas", error, 0.0 if self.world.exact else self._allowed, where or what, point)

    def _compare_names(self, point: str, found: dict[Key, torch.Tensor]) -> None:
        wanted = [where for at, what, where in self.reference.expected if at == point and what == "gradients"]
        got = [where for what, where in found if what == "gradients"]
        self.missing += tuple(name for name in wanted if name not in (*got, *self.missing))
        self.unexpected += tuple(name for name in got if name not in (*wanted, *self.unexpected))

    def _compare_ties(self, training: TrainingRun) -> None:
        if isinstance(training.model, PipelinedModel):
            held = [
                [local_of(p) for p in holders.values()]
                for holders in training.model.shared.local_parameters()
            ]
            if held:
                agree = all(one.equal(first) for first, *others in held for one in others)
                self._note("tied", 0.0 if agree else math.inf, 0.0, "", "")
            return
        parameters = dict(training.model.named_parameters(remove_duplicate=False))
        for names in self.reference.tied:
            apart = len({id(parameters.get(name)) for name in names}) > 1
            self._note("tied", float("inf") if apart else 0.0, 0.0, " and ".join(names) if apart else "", "")

    def result(self, options: TPOptions, scenario: Scenario) -> CaseResult:
        """Return the checks, in the order of the training."""
        kinds = [
            what for what in dict.fromkeys(key[1] for key in self.reference.expected) if what != "outputs"
        ]
        late = ("replicas", "norm", "AdamW", "tied")
        order = [*(k for k in kinds if k not in late), *late]
        checks = tuple(self.worst[what] for what in order if what in self.worst)
        return CaseResult(options, scenario, checks, self.missing, self.unexpected)


def _same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the last bit, by one operator."""
    return value.dtype == other.dtype and torch.equal(value, other)
