"""The report of a proof, as frozen data, as JSON and as a table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from titanplans.proof.batches.conditions import PLAIN, Scenario
from titanplans.proof.result import CaseResult, Refusal, epsilons, options_as_json, sharded_or_replicated
from titanplans.text import columns

CHECKS = ("loss", "logits", "gradients", "replicas", "norm", "AdamW")


@dataclass(frozen=True)
class Report:
    """The verdict on one plan and one model."""

    subject: str
    """The names of the model's class and of the plan's class."""
    dtype: str
    cases: tuple[CaseResult, ...]
    refused: tuple[Refusal, ...] = ()
    trainings: tuple[Scenario, ...] = ()
    """The trainings of the cases, without settings such as frozen or recomputed. The table calls them A, B, C, ..."""
    uncovered: tuple[str, ...] = ()
    """Conditions that no case covers, in words."""
    ranks: str = "threads"
    """threads or process_group."""

    @property
    def passed(self) -> bool:
        """Whether every case passed. Refused options don't count; the table lists them as not proved."""
        return bool(self.cases) and all(case.passed for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types, with "passed" for each case and check, and infinity and NaN as strings."""
        report = _json_value(asdict(self)) | {"passed": self.passed}
        for case, case_dict in zip(self.cases, report["cases"], strict=True):
            del case_dict["options"]
            case_dict |= options_as_json(case.options) | {"passed": case.passed}
            for check, check_dict in zip(case.checks, case_dict["checks"], strict=True):
                check_dict["passed"] = check.passed
        for refusal, refusal_dict in zip(self.refused, report["refused"], strict=True):
            refusal_dict["options"] = [options_as_json(options) for options in refusal.options]
        return report

    def table(self) -> str:
        """Return the report as text: a row for each case, with differences in epsilons, and the faults of failing cases."""
        kinds = dict.fromkeys(check.what for case in self.cases for check in case.checks)
        checks = (*CHECKS, *(what for what in kinds if what.endswith(" loss")))
        degrees = [case.options.degrees for case in self.cases]
        others = [name for name in ("cp", "ep", "pp") if any(getattr(each, name) > 1 for each in degrees)]
        dims = ("tp", *others)
        head = (*dims, "loss", "sequence", "training", *checks, "verdict", "worst")
        rows = [head, *(_row(case, checks, training(case, self), dims) for case in self.cases)]
        first_check = len(dims) + 3
        lines = [
            f"{self.subject}, {self.dtype}, ranks: {self.ranks}",
            "",
            *columns(rows, right=(*range(len(dims)), *range(first_check, len(head) - 2))),
            "",
        ]
        uncovered = [f"not covered: {words}" for words in self.uncovered]
        return "\n".join([*lines, *_failures(self), *map(str, self.refused), *uncovered, _legend(self)])


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def training(case: CaseResult, report: Report) -> str:
    """Return the letter of a case's training and its settings, for example "B, frozen, recomputed"."""
    letters = {each: chr(ord("A") + index) for index, each in enumerate(report.trainings)}
    scenario = case.scenario
    plain = replace(scenario, dtype=PLAIN.dtype, frozen="", recomputed=False, differing=False, fused=False)
    words = [name for name in ("frozen", "recomputed", "differing", "fused") if getattr(scenario, name)]
    dtype = [scenario.dtype] if scenario.dtype != PLAIN.dtype else []
    return ", ".join([letters.get(plain, "own"), *words, *dtype])


def _row(case: CaseResult, checks: Sequence[str], training: str, dims: Sequence[str]) -> tuple[str, ...]:
    errors = {check.what: epsilons(check.error) for check in case.checks}
    if case.missing:
        errors["gradients"] = "missing"
    return (
        *(str(getattr(case.options.degrees, name)) for name in dims),
        sharded_or_replicated(case.options.loss_parallel),
        sharded_or_replicated(case.options.sequence_parallel),
        training,
        *(errors.get(what, "-") for what in checks),
        "right" if case.passed else "WRONG",
        case.worst,
    )


def _failures(report: Report) -> Iterator[str]:
    """Yield lines on the failing cases; cases with the same fault are listed together."""
    by_fault: dict[object, list[CaseResult]] = {}
    for case in report.cases:
        if not case.passed:
            finding = (f.direction, f.first.name, f.reason) if (f := case.finding) else None
            by_fault.setdefault((finding, case.notes, case.conditions), []).append(case)
    for first, *others in by_fault.values():
        names = dict.fromkeys(case.name for case in (first, *others))
        needed = f" only with {' and '.join(first.conditions)}" if first.conditions else ""
        yield f"wrong{needed}: {'; '.join(names)}"
        faults = [*([str(first.finding)] if first.finding else []), *first.notes]
        yield from (f"  {line}" for line in faults or [first.worst])
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
    replica_tolerances = {
        check.tolerance for case in report.cases for check in case.checks if check.what == "replicas"
    }
    equal = "; replicas must be equal" if replica_tolerances == {0.0} else ""
    epsilon = f"one {report.dtype} rounding of every weight"
    return f"{verdict}. Differences in epsilons ({epsilon}){allowed}{equal}."
