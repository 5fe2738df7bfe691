"""What a proof returns: plain frozen data. How it is printed is titanplans/proof/table.py."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from titanplans.plan.plan import TPOptions
from titanplans.proof.batches.conditions import Scenario


@dataclass(frozen=True)
class Check:
    """One quantity of the split model against the same one of the whole model."""

    what: str
    """runs, loss, logits, gradients, replicas, scale, norm, AdamW or tied."""

    error: float
    """The worst difference, in epsilons: units of what one rounding of every weight changes."""

    tolerance: float
    """The most that sums in another order may differ by, in epsilons."""

    where: str = ""
    """The parameter with the worst difference; empty for what is one for the whole model."""

    point: str = ""
    """When in the training: "step 2, batch 1"."""

    @property
    def passed(self) -> bool:
        """Whether the difference is one of rounding. A difference that is not a number is not."""
        return self.error <= self.tolerance

    @property
    def share(self) -> float:
        """The difference as a share of the tolerance."""
        return self.error / self.tolerance if self.tolerance else self.error

    @property
    def name(self) -> str:
        """The quantity, and the parameter where it is one of many."""
        return f"{self.what} {self.where}".strip()


@dataclass(frozen=True)
class Location:
    """A module's output, that output's gradient, or a parameter's gradient."""

    name: str
    error: float
    """In epsilons."""

    note: str = ""
    """How the ranks' tensors were put together, where that says something."""

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.note})' if self.note else ''} {epsilons(self.error)}"


@dataclass(frozen=True)
class Finding:
    """Where an error first appears in one direction."""

    direction: str
    """forward or backward."""

    first: Location
    healthy: tuple[Location, ...]
    """The nearest that were right before it in this direction, the nearest first."""

    reason: str = ""
    """What the error is, where that is certain: "exactly 2 times too large"."""

    remedy: str = ""
    """The style that would sum a gradient that is not summed, where the parameter's place says it."""

    def __str__(self) -> str:
        reason = f", {self.reason}" if self.reason else ""
        reason += f"; {self.remedy} sums it" if self.remedy else ""
        beside = f"; healthy beside it: {', '.join(map(str, self.healthy))}" if self.healthy else ""
        error = epsilons(self.first.error)
        return f"{self.direction}: first off at {self.first.name}: {error} epsilons{reason}{beside}"


@dataclass(frozen=True)
class CaseResult:
    """One training at one degree with one choice of options."""

    options: TPOptions
    scenario: Scenario
    checks: tuple[Check, ...]
    missing: tuple[str, ...] = ()
    """Parameters with a gradient in the whole model and none in the split one."""

    unexpected: tuple[str, ...] = ()
    """Parameters with a gradient in the split model and none in the whole one."""

    finding: Finding | None = None
    """Where a failing case goes wrong first."""

    notes: tuple[str, ...] = ()
    """What of a failing case is not a matter of place: an exception, a missing gradient, weights no longer tied; and of any
    case, who asked for a rank's number in the world."""

    conditions: tuple[str, ...] = ()
    """What a failing case needs to be wrong: without any one of these it is right. Empty: it is wrong plainly."""

    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every check passed and no gradient is missing or unexpected."""
        return all(c.passed for c in self.checks) and not self.missing and not self.unexpected

    @property
    def beyond_tolerance(self) -> bool:
        """Whether it fails for differences alone that a larger unit might be the measure of."""
        failed = [check for check in self.checks if not check.passed]
        measured = all(check.what not in ("runs", "replicas", "tied") for check in failed)
        return bool(failed) and measured and not self.missing and not self.unexpected

    @property
    def worst(self) -> str:
        """The first check that failed, and where; if all passed, the one nearest to its tolerance."""
        failed = [check for check in self.checks if not check.passed]
        nearest = failed[0] if failed else max(self.checks, key=lambda c: c.error / max(c.tolerance, 1.0))
        if (absent := self.missing or self.unexpected) and nearest.what not in ("loss", "logits"):
            return f"gradients {absent[0]}"
        return nearest.name

    @property
    def name(self) -> str:
        """Its options in words."""
        return case_name(self.options)


@dataclass(frozen=True)
class Refusal:
    """Choices of options at one degree that strict application does not accept, all for one reason."""

    options: tuple[TPOptions, ...]
    reason: str

    def __str__(self) -> str:
        return f"not proved: {case_name(*self.options)}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """The verdict on one plan and one model."""

    subject: str
    """The model's class and the plan's."""

    dtype: str
    cases: tuple[CaseResult, ...]
    refused: tuple[Refusal, ...] = ()
    trainings: tuple[Scenario, ...] = ()
    """The trainings of the cases, before some of it is frozen, recomputed, …; the table calls them A, B, C."""

    unreached: tuple[str, ...] = ()
    """What the cases don't show, in words: conditions of this model, quantities that rounding hides."""

    ranks: str = "threads"
    """threads or process_group."""

    @property
    def passed(self) -> bool:
        """Whether every case passed. What was refused was not proved, and says so in the table."""
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
        """Return the report as text (see titanplans/proof/table.py)."""
        from titanplans.proof.table import table

        return table(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def case_name(*cases: TPOptions) -> str:
    """Return in words what cases of one degree have in common: "tp 2, loss sharded, sequence whole"."""
    words = [f"tp {cases[0].degree}"]
    losses, sequences = {case.loss_parallel for case in cases}, {case.sequence_parallel for case in cases}
    for what, sharded in (("loss", losses), ("sequence", sequences)):
        if len(sharded) == 1:
            words.append(f"{what} {'sharded' if sharded.pop() else 'whole'}")
    return ", ".join(words)


def options_as_json(options: TPOptions) -> dict[str, Any]:
    """Return what tells a case from the others of a report."""
    return {name: getattr(options, name) for name in ("degree", "loss_parallel", "sequence_parallel")}


def epsilons(error: float) -> str:
    """Return a number of epsilons in at most seven characters."""
    if not math.isfinite(error):
        return str(error)
    return f"{error:.1f}" if error < 1000 else f"{error:.1e}"
