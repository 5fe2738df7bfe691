"""The report of a proof: plain frozen data, as JSON, and as a table with a row a case and the faults of failing ones."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from titanplans.proof.batches.conditions import PLAIN, Scenario
from titanplans.proof.result import CaseResult, Refusal, epsilons, options_as_json
from titanplans.text import columns

CHECKS = ("loss", "logits", "gradients", "replicas", "norm", "AdamW")


@dataclass(frozen=True)
class Report:
    """The verdict on one plan and one model."""

    subject: str
    """The model's class and the plan's."""
    dtype: str
    cases: tuple[CaseResult, ...]
    refused: tuple[Refusal, ...] = ()
    trainings: tuple[Scenario, ...] = ()
    """The trainings of the cases, without frozen, recomputed, …; the table calls them A, B, C."""
    unreached: tuple[str, ...] = ()
    """Conditions of this model that no case has, in words."""
    ranks: str = "threads"
    """threads or process_group."""

    @property
    def passed(self) -> bool:
        """Whether every case passed. The table lists refused choices as not proved."""
        return bool(self.cases) and all(case.passed for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it, verdicts included; numbers that are not finite as strings."""
        found = _plain(asdict(self)) | {"passed": self.passed}
        for case, written in zip(self.cases, found["cases"], strict=True):
            del written["options"]
            written |= options_as_json(case.options) | {"passed": case.passed}
            for check, one in zip(case.checks, written["checks"], strict=True):
                one["passed"] = check.passed
        for refusal, written in zip(self.refused, found["refused"], strict=True):
            written["options"] = [options_as_json(options) for options in refusal.options]
        return found

    def table(self) -> str:
        """Return the report as text, its numbers in epsilons."""
        found = dict.fromkeys(check.what for case in self.cases for check in case.checks)
        checks = (*CHECKS, *(what for what in found if what.endswith(" loss")))
        degrees = [case.options.degrees for case in self.cases]
        others = [name for name in ("cp", "ep", "pp") if any(getattr(cut, name) > 1 for cut in degrees)]
        cuts = ("tp", *others)
        head = (*cuts, "loss", "sequence", "training", *checks, "verdict", "worst")
        rows = [head, *(_row(case, checks, training(case, self), cuts) for case in self.cases)]
        first = len(cuts) + 3
        lines = [
            f"{self.subject}, {self.dtype}, ranks: {self.ranks}",
            "",
            *columns(rows, right=(*range(first - 3), *range(first, len(head) - 2))),
            "",
        ]
        unreached = [f"not reached: {words}" for words in self.unreached]
        return "\n".join([*lines, *_failures(self), *map(str, self.refused), *unreached, _legend(self)])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def training(case: CaseResult, report: Report) -> str:
    """Return the letter of a case's training, and the settings that hold throughout it."""
    letters = {one: chr(ord("A") + at) for at, one in enumerate(report.trainings)}
    scenario = case.scenario
    plain = replace(scenario, dtype=PLAIN.dtype, frozen="", recomputed=False, differing=False, fused=False)
    words = [name for name in ("frozen", "recomputed", "differing", "fused") if getattr(scenario, name)]
    dtype = [scenario.dtype] if scenario.dtype != PLAIN.dtype else []
    return ", ".join([letters.get(plain, "own"), *words, *dtype])


def _row(case: CaseResult, checks: Sequence[str], trained: str, cuts: Sequence[str]) -> tuple[str, ...]:
    errors = {check.what: epsilons(check.error) for check in case.checks}
    if case.missing:
        errors["gradients"] = "missing"
    return (
        *(str(getattr(case.options.degrees, name)) for name in cuts),
        "sharded" if case.options.loss_parallel else "whole",
        "sharded" if case.options.sequence_parallel else "whole",
        trained,
        *(errors.get(what, "-") for what in checks),
        "right" if case.passed else "WRONG",
        case.worst,
    )


def _failures(report: Report) -> Iterator[str]:
    """Yield the faults, once for all cases with the same fault at the same place."""
    alike: dict[object, list[CaseResult]] = {}
    for case in report.cases:
        if not case.passed:
            place = (f.direction, f.first.name, f.reason) if (f := case.finding) else None
            alike.setdefault((place, case.notes, case.conditions), []).append(case)
    for first, *others in alike.values():
        names = dict.fromkeys(case.name for case in (first, *others))
        needed = f" only with {' and '.join(first.conditions)}" if first.conditions else ""
        yield f"wrong{needed}: {'; '.join(names)}"
        found = [*([str(first.finding)] if first.finding else []), *first.notes]
        yield from (f"  {line}" for line in found or [first.worst])
        yield ""


def _legend(report: Report) -> str:
    tolerances = {
        check.tolerance
        for case in report.cases
        for check in case.checks
        if check.what == "loss" and case.scenario.dtype == report.dtype
    }
    wrong = sum(not case.passed for case in report.cases)
    verdict = (
        f"{wrong} of {len(report.cases)} cases WRONG" if wrong else f"all {len(report.cases)} cases right"
    )
    allowed = f"; sums in another order may differ by {epsilons(max(tolerances))}" if tolerances else ""
    replicas = {check.tolerance for case in report.cases for check in case.checks if check.what == "replicas"}
    equal = "; replicas must be equal" if replicas == {0.0} else ""
    return f"{verdict}. Differences in epsilons, what one rounding of every weight changes{allowed}{equal}."
