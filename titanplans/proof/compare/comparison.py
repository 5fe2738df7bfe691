"""Compares the split model's training with the unsplit model's, quantity by quantity. Start at `Comparison`."""

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
    """Compares a split model's training with the `reference` while it runs.

    Attributes:
        worst: for each kind of quantity, the passing check nearest to its tolerance, or the first failing check.
        missing: parameters with a gradient in the unsplit model only.
        unexpected: parameters with a gradient in the split model only.
    """

    reference: ReferenceRun
    world: World
    worst: dict[str, Check] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def run(self, training: TrainingRun) -> None:
        """Run `training` and compare at each point of it. Stop at the end of the first step with a difference."""
        for point, quantities in training.points():
            with torch.no_grad():
                full = full_tensors([*quantities.values()], self.world)
                for key, replicas in zip(quantities, full, strict=True):
                    self._compare(point, key, replicas)
            if ("norm", "") in quantities:
                self._compare_names(point, quantities)
                # Later steps would differ because of this step. If there is only one step, its weights are still compared.
                if len(training.script.steps) > 1 and not self.world.gather_objects(self.passed)[0]:
                    break
        self._compare_ties(training)

    @property
    def passed(self) -> bool:
        """Whether all quantities compared so far are right."""
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

    def _compare(self, point: str, key: Key, replicas: list[torch.Tensor]) -> None:
        at: Point = (point, *key)
        if not self.world.is_first or at not in self.reference.expected:
            return
        (what, where), (first, *others) = key, replicas
        # Most replicas are bitwise equal, and need no further comparison.
        others = [other for other in others if not _is_equal(other, first)]
        difference_of, expected = self.reference.tolerance.difference, self.reference.expected[at]
        error = max(difference_of(value, expected) for value in (first, *others)) / self.reference.units[at]
        if self.reference.tolerance.compares(what) or not math.isfinite(error):
            self._note(what, error, self._allowed, where, point)
        unit = torch.finfo(first.dtype).eps * largest(first)
        worst = max((difference(other, first) for other in others), default=0.0)
        error = worst / unit if unit else worst and math.inf
        self._note("replicas", error, 0.0 if self.world.exact else self._allowed, where or what, point)

    def _compare_names(self, point: str, quantities: dict[Key, torch.Tensor]) -> None:
        expected = [
            where for at, what, where in self.reference.expected if at == point and what == "gradients"
        ]
        actual = [where for what, where in quantities if what == "gradients"]
        self.missing += tuple(name for name in expected if name not in (*actual, *self.missing))
        self.unexpected += tuple(name for name in actual if name not in (*expected, *self.unexpected))

    def _compare_ties(self, training: TrainingRun) -> None:
        if isinstance(training.model, PipelinedModel):
            # Each stage holds its own copy of a tied parameter, with equal values.
            tied = [
                [local_of(p) for p in by_stage.values()]
                for by_stage in training.model.shared.local_parameters()
            ]
            if tied:
                is_equal = all(other.equal(first) for first, *others in tied for other in others)
                self._note("tied", 0.0 if is_equal else math.inf, 0.0, "", "")
            return
        parameters = dict(training.model.named_parameters(remove_duplicate=False))
        for names in self.reference.tied:
            is_untied = len({id(parameters.get(name)) for name in names}) > 1
            where = " and ".join(names) if is_untied else ""
            self._note("tied", math.inf if is_untied else 0.0, 0.0, where, "")

    def result(self, options: TPOptions, scenario: Scenario) -> CaseResult:
        """Return the result of the case, with its checks in the order of the training."""
        kinds = [
            what for what in dict.fromkeys(key[1] for key in self.reference.expected) if what != "outputs"
        ]
        late = ("replicas", "norm", "AdamW", "tied")
        order = [*(k for k in kinds if k not in late), *late]
        checks = tuple(self.worst[what] for what in order if what in self.worst)
        return CaseResult(options, scenario, checks, self.missing, self.unexpected)


def _is_equal(value: torch.Tensor, other: torch.Tensor) -> bool:
    return value.dtype == other.dtype and torch.equal(value, other)
