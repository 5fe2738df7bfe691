"""A report as text: one row a case, and the faults of the failing ones below."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from titanplans.proof.batches.conditions import PLAIN
from titanplans.proof.compare.scale import SCALE
from titanplans.proof.report import CaseResult, Report, epsilons
from titanplans.text import columns

CHECKS = ("loss", "logits", "gradients", "replicas", "norm", "AdamW")


def table(report: Report) -> str:
    """Return `report` as text, its numbers in epsilons."""
    found = dict.fromkeys(check.what for case in report.cases for check in case.checks)
    checks = (*CHECKS, *(what for what in found if what == SCALE or what.endswith(" loss")))
    head = ("tp", "loss", "sequence", "training", *checks, "verdict", "worst")
    rows = [head, *(_row(case, checks, training(case, report)) for case in report.cases)]
    lines = [
        f"{report.subject}, {report.dtype}, ranks: {report.ranks}",
        "",
        *columns(rows, right=(0, *range(4, len(head) - 2))),
        "",
    ]
    unreached = [f"not reached: {words}" for words in report.unreached]
    return "\n".join([*lines, *_failures(report), *map(str, report.refused), *unreached, _legend(report)])


def training(case: CaseResult, report: Report) -> str:
    """Return the letter of a case's training, and the settings that hold throughout it."""
    letters = {one: chr(ord("A") + at) for at, one in enumerate(report.trainings)}
    scenario = case.scenario
    plain = replace(scenario, dtype=PLAIN.dtype, frozen="", recomputed=False, differing=False, fused=False)
    words = [name for name in ("frozen", "recomputed", "differing", "fused") if getattr(scenario, name)]
    dtype = [scenario.dtype] if scenario.dtype != PLAIN.dtype else []
    return ", ".join([letters.get(plain, "own"), *words, *dtype])


def _row(case: CaseResult, checks: Sequence[str], trained: str) -> tuple[str, ...]:
    errors = {check.what: epsilons(check.error) for check in case.checks}
    if case.missing:
        errors["gradients"] = "missing"
    return (
        str(case.options.degree),
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
        needed = f": right, but for {' and '.join(first.conditions)}" if first.conditions else ""
        yield f"wrong: {'; '.join(names)}{needed}"
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
    return f"{verdict}. Differences in epsilons, what one rounding of every weight changes{allowed}; replicas must be equal."
