"""The result of one case of a proof, and of its checks: plain frozen data."""

import math
from dataclasses import dataclass
from typing import Any

from titanplans.plan.options import TPOptions
from titanplans.proof.batches.conditions import Scenario


@dataclass(frozen=True)
class Check:
    """One kind of quantity of the split model, compared with the whole model's."""

    what: str
    """runs, loss, logits, gradients, replicas, norm, AdamW, tied, or the name of a further loss."""
    error: float
    """The worst difference, in epsilons: units of the change by one rounding of every weight; of replicas, roundings of the
    tensor itself; 0 or infinite for what either holds or does not."""
    tolerance: float
    """The largest difference of sums in another order, in epsilons."""
    where: str = ""
    """The parameter with the worst difference, or what of a further loss differs; "" for a quantity of the model."""
    point: str = ""
    """When in the training: "step 2, batch 1"."""

    @property
    def passed(self) -> bool:
        """Whether the difference is rounding; NaN is not."""
        return self.error <= self.tolerance

    @property
    def share(self) -> float:
        """The difference as a share of the tolerance."""
        return self.error / self.tolerance if self.tolerance else self.error

    @property
    def name(self) -> str:
        """The quantity, and the parameter if there are several."""
        return f"{self.what} {self.where}".strip()


@dataclass(frozen=True)
class Location:
    """A module's output, that output's gradient, or a parameter's gradient."""

    name: str
    error: float
    """In epsilons."""
    note: str = ""
    """How the ranks' tensors were assembled, if that tells something."""

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.note})' if self.note else ''} {epsilons(self.error)}"


@dataclass(frozen=True)
class Finding:
    """The first place of an error in one direction."""

    direction: str
    """forward or backward."""
    first: Location
    healthy: tuple[Location, ...]
    """Right places near it, the nearest first."""
    reason: str = ""
    """The fault, if it is certain: "exactly 2 times too large"."""
    remedy: str = ""
    """The style that would sum a gradient that is not summed, if the parameter's place tells."""
    hint: str = ""
    """What the plan may have got wrong there, if no fault is certain."""

    def __str__(self) -> str:
        reason = f", {self.reason}" if self.reason else ""
        reason += f"; {self.remedy} sums it" if self.remedy else ""
        reason += f"; {self.hint}" if self.hint else ""
        healthy = f"; healthy beside it: {', '.join(map(str, self.healthy))}" if self.healthy else ""
        error = epsilons(self.first.error)
        return f"{self.direction}: first off at {self.first.name}: {error} epsilons{reason}{healthy}"


@dataclass(frozen=True)
class CaseResult:
    """The result of one training at one degree with one choice of options."""

    options: TPOptions
    scenario: Scenario
    checks: tuple[Check, ...]
    missing: tuple[str, ...] = ()
    """Parameters with a gradient in the whole model only."""
    unexpected: tuple[str, ...] = ()
    """Parameters with a gradient in the split model only."""
    finding: Finding | None = None
    """Where a failing case goes wrong first."""
    notes: tuple[str, ...] = ()
    """Faults without a place: an exception, a missing gradient, weights no longer tied; and modules that asked for a
    rank's number in the world."""
    conditions: tuple[str, ...] = ()
    """The conditions that a failing case needs: without any one of them it is right. Empty: it fails plainly."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every check passed and no gradient is missing or unexpected."""
        return all(c.passed for c in self.checks) and not self.missing and not self.unexpected

    @property
    def beyond_tolerance(self) -> bool:
        """Whether it fails only by differences that a larger unit might allow."""
        failed = [check for check in self.checks if not check.passed]
        measured = all(check.what not in ("runs", "replicas", "tied") for check in failed)
        return bool(failed) and measured and not self.missing and not self.unexpected

    @property
    def worst(self) -> str:
        """The first failing check and its place; if all passed, the one nearest to its tolerance."""
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
    """Choices of options at one degree that strict application refuses for one reason."""

    options: tuple[TPOptions, ...]
    reason: str

    def __str__(self) -> str:
        return f"not proved: {case_name(*self.options)}: {self.reason}"


def case_name(*cases: TPOptions) -> str:
    """Return the common options of cases of one degree, in words: "tp 2, loss sharded, sequence whole"."""
    words = [str(cases[0].degrees)]
    losses, sequences = {case.loss_parallel for case in cases}, {case.sequence_parallel for case in cases}
    for what, sharded in (("loss", losses), ("sequence", sequences)):
        if len(sharded) == 1:
            words.append(f"{what} {'sharded' if sharded.pop() else 'whole'}")
    return ", ".join(words)


def keywords(options: TPOptions) -> dict[str, Any]:
    """Return `options` as the keywords of `apply_plan` and `check_plan`, without the degrees."""
    names = ("loss_parallel", "sequence_parallel", "sequence_dim")
    return {name: getattr(options, name) for name in names}


def options_as_json(options: TPOptions) -> dict[str, Any]:
    """Return the options that tell a case from the others of a report."""
    sharded = {name: getattr(options, name) for name in ("loss_parallel", "sequence_parallel")}
    return {name: getattr(options.degrees, name) for name in ("tp", "cp", "ep", "pp")} | sharded


def epsilons(error: float) -> str:
    """Return a number of epsilons in at most seven characters."""
    if not math.isfinite(error):
        return str(error)
    return f"{error:.1f}" if error < 1000 else f"{error:.1e}"
