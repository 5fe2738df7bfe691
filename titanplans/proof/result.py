"""The result of one case of a proof, as plain frozen data. Start at `CaseResult`."""

import math
from dataclasses import dataclass
from typing import Any

from titanplans.plan.options import TPOptions
from titanplans.proof.batches.conditions import Scenario


@dataclass(frozen=True)
class Check:
    """The worst difference between the split and the unsplit model for one kind of quantity."""

    what: str
    """runs, loss, logits, gradients, replicas, norm, AdamW, tied, or the name of a further loss."""
    error: float
    """The worst difference, in epsilons: the largest change of the quantity when every weight is perturbed by one rounding
    (titanplans/proof/compare/tolerance.py). For replicas, in roundings of the tensor itself. For "runs" and "tied", which
    are true or false: 0 if true, else infinity."""
    tolerance: float
    """The largest difference that another order of sums can explain, in epsilons."""
    where: str = ""
    """The parameter with the worst difference; "its gradient" for the gradient of a further loss; "" for other
    quantities."""
    point: str = ""
    """When in the training, for example "step 2, batch 1"."""

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.error <= self.tolerance

    @property
    def relative_error(self) -> float:
        """The difference divided by the tolerance; the difference if the tolerance is 0."""
        return self.error / self.tolerance if self.tolerance else self.error

    @property
    def name(self) -> str:
        """The kind of quantity, and the parameter."""
        return f"{self.what} {self.where}".strip()


@dataclass(frozen=True)
class Location:
    """A tensor of the training: a module's output, the gradient of that output, or a parameter's gradient."""

    name: str
    error: float
    """Difference from the unsplit model's tensor, in epsilons."""
    note: str = ""
    """How the ranks' tensors were combined, for example "summed over the ranks"; "" if they are replicas or plain shards."""

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.note})' if self.note else ''} {epsilons(self.error)}"


@dataclass(frozen=True)
class Finding:
    """The first wrong tensor of a forward or of a backward."""

    direction: str
    """forward or backward."""
    first: Location
    correct: tuple[Location, ...]
    """Correct tensors near the first wrong one, the nearest first."""
    reason: str = ""
    """The fault, if the numbers leave no doubt, for example "exactly 2 times too large"."""
    remedy: str = ""
    """The style that would sum a gradient that is not summed, if it follows from the parameter's position in the plan."""
    hint: str = ""
    """A likely mistake of the plan, if the fault is not certain."""

    def __str__(self) -> str:
        reason = f", {self.reason}" if self.reason else ""
        reason += f"; {self.remedy} sums it" if self.remedy else ""
        reason += f"; {self.hint}" if self.hint else ""
        correct = f"; correct nearby: {', '.join(map(str, self.correct))}" if self.correct else ""
        error = epsilons(self.first.error)
        return f"{self.direction}: first wrong at {self.first.name}: {error} epsilons{reason}{correct}"


@dataclass(frozen=True)
class CaseResult:
    """The result of one training at one degree with one choice of options."""

    options: TPOptions
    scenario: Scenario
    checks: tuple[Check, ...]
    missing: tuple[str, ...] = ()
    """Parameters with a gradient in the unsplit model only."""
    unexpected: tuple[str, ...] = ()
    """Parameters with a gradient in the split model only."""
    finding: Finding | None = None
    """The first wrong tensor of a failing case."""
    notes: tuple[str, ...] = ()
    """Faults that are not a wrong tensor: an exception, a missing gradient, weights no longer tied. Also the Python modules
    that called `dist.get_rank()`."""
    conditions: tuple[str, ...] = ()
    """The conditions that a failing case needs: without any one of them it passes. Empty: it fails without conditions."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every check passed and no gradient is missing or unexpected."""
        return all(c.passed for c in self.checks) and not self.missing and not self.unexpected

    @property
    def beyond_tolerance(self) -> bool:
        """Whether the case may pass with a larger unit: it fails only by differences that exceed their tolerance."""
        failed = [check for check in self.checks if not check.passed]
        is_measured = all(check.what not in ("runs", "replicas", "tied") for check in failed)
        return bool(failed) and is_measured and not self.missing and not self.unexpected

    @property
    def worst(self) -> str:
        """The name of the first failing check; if all passed, of the check nearest to its tolerance."""
        failed = [check for check in self.checks if not check.passed]
        nearest = failed[0] if failed else max(self.checks, key=lambda c: c.error / max(c.tolerance, 1.0))
        if (absent := self.missing or self.unexpected) and nearest.what not in ("loss", "logits"):
            return f"gradients {absent[0]}"
        return nearest.name

    @property
    def name(self) -> str:
        return case_name(self.options)


@dataclass(frozen=True)
class Refusal:
    """Options of one degree that the plan's checks refuse for one reason."""

    options: tuple[TPOptions, ...]
    reason: str

    def __str__(self) -> str:
        return f"not proved: {case_name(*self.options)}: {self.reason}"


def case_name(*cases: TPOptions) -> str:
    """Return the options that cases of one degree have in common, in words: "tp 2, loss sharded, sequence replicated"."""
    words = [str(cases[0].degrees)]
    losses, sequences = {case.loss_parallel for case in cases}, {case.sequence_parallel for case in cases}
    for what, values in (("loss", losses), ("sequence", sequences)):
        if len(values) == 1:
            words.append(f"{what} {sharded_or_replicated(values.pop())}")
    return ", ".join(words)


def sharded_or_replicated(is_sharded: bool) -> str:
    """Return the layout of the logits or of the sequence, in a word."""
    return "sharded" if is_sharded else "replicated"


def keywords(options: TPOptions) -> dict[str, Any]:
    """Return `options` as keyword arguments of `apply_plan` and `check_plan`, without the degrees."""
    names = ("loss_parallel", "sequence_parallel", "sequence_dim")
    return {name: getattr(options, name) for name in names}


def options_as_json(options: TPOptions) -> dict[str, Any]:
    """Return the options in which the cases of a report differ."""
    flags = {name: getattr(options, name) for name in ("loss_parallel", "sequence_parallel")}
    return {name: getattr(options.degrees, name) for name in ("tp", "cp", "ep", "pp")} | flags


def epsilons(error: float) -> str:
    """Format a number of epsilons in at most seven characters."""
    if not math.isfinite(error):
        return str(error)
    return f"{error:.1f}" if error < 1000 else f"{error:.1e}"
