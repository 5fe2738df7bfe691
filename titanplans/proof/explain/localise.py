"""The first wrong tensor of a failing case: each module's output and its gradient are compared. Start at `localise`.

This does not decide whether a case fails. Outputs have no declared layout, so they are assembled from the ranks' tensors
in the way that fits best (titanplans/proof/compare/assemble.py).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.plan.options import TPOptions
from titanplans.plan.resolve import ResolvedPlan
from titanplans.proof.compare.assemble import best_fit
from titanplans.proof.compare.record import gradient_key, module_name
from titanplans.proof.compare.reference import ReferenceRun
from titanplans.proof.compare.tolerance import difference
from titanplans.proof.compare.training import TrainingRun
from titanplans.proof.explain.hints import (
    added_loss_to_name,
    packed_around,
    sections_to_check,
    summing_style,
)
from titanplans.proof.ranks.world import World, from_first, full_tensors
from titanplans.proof.result import CaseResult, Finding, Location, epsilons
from titanplans.split.decoder import within
from titanplans.styles.base import Style

_UNSUMMED = "the gradient is partial: not summed over the ranks"

HEALTHY = 2
"""Number of correct tensors that are named next to a wrong one."""


class _Comparison(NamedTuple):
    """One tensor of the split model, compared with the unsplit model's."""

    location: Location
    value: torch.Tensor
    """The full tensor; the first of several replicas."""
    partials: list[torch.Tensor] | None
    """Each rank's tensor, if they may be partial and have the full shape."""
    expected: torch.Tensor
    unit: float


def localise(
    training: TrainingRun,
    plan: ResolvedPlan,
    reference: ReferenceRun,
    world: World,
    case: CaseResult,
) -> CaseResult:
    """Return the failing `case` with the first wrong tensor of its forward, or else of its backward.

    Args:
        training: the split model's training, recorded; up to the failure if it failed.
        plan: the plan of the unsplit model.
        reference: a recorded reference.
        world: every rank of it calls this.
        case: the result without a finding.
    """
    search = _Search(training, plan, reference, world, case.options)
    finding = from_first(world, search.first_wrong("forward", search.outputs()))
    if finding is None and case.checks[0].what != "runs":
        finding = from_first(world, search.first_wrong("backward", search.gradients()))
    notes = list(_notes(case))
    if finding is None or finding.direction == "backward":
        added = added_loss_to_name(plan.source, reference.pristine, adds_loss=training.adds_loss)
        notes += [added] if added else []
    if finding is None and not notes:
        notes = [
            f"{check.name}: {epsilons(check.error)} epsilons" for check in case.checks if not check.passed
        ]
    return replace(case, finding=finding, notes=tuple(notes))


def _notes(case: CaseResult) -> Iterator[str]:
    """Yield the faults that are not a wrong tensor."""
    yield from case.notes
    yield from (f"{name}: no gradient, but the unsplit model has one" for name in case.missing)
    yield from (f"{name}: a gradient, but the unsplit model has none" for name in case.unexpected)
    for check in case.checks:
        if not check.passed and check.what == "tied":
            yield f"{check.where}: no longer one tensor"
        if not check.passed and check.what == "replicas":
            yield f"{check.where}: differs between the ranks"


@dataclass
class _Search:
    """Compares the recorded tensors of the split and the unsplit model. Arguments as in `localise`."""

    training: TrainingRun
    plan: ResolvedPlan
    reference: ReferenceRun
    world: World
    options: TPOptions

    def __post_init__(self) -> None:
        # A rank that failed has recorded fewer tensors than the other ranks.
        recorded = {(point, key) for point, record in self.training.records.items() for key in record.tensors}
        self.common = set.intersection(*self.world.gather_objects(recorded))

    def outputs(self) -> list[_Comparison]:
        """Compare each module's output, in the order in which the modules finished."""
        outputs = (
            self._output(point, key, key) for point, order in self.reference.orders.items() for key in order
        )
        return [output for output in outputs if output is not None]

    def gradients(self) -> list[_Comparison]:
        """Compare, from the loss backwards, the gradients of each module's output and of the module's parameters.

        Only the newest step is compared, since a training ends at the first step with a difference.
        """
        remaining = dict(self.training.raw)
        parameters = self.training.model.named_parameters()
        aligned = {name: param.grad for name, param in parameters if param.grad is not None}
        batches = [point for point in self.training.records if ", batch " in point]
        step = batches[-1].partition(",")[0]
        batches = [point for point in batches if point.startswith(f"{step},")]
        comparisons: list[_Comparison] = []
        for point in batches:
            for key in reversed(self.reference.orders[point]):
                output = self._output(point, gradient_key(key), f"gradient of the output of {key}")
                if output is not None:
                    comparisons.append(output)
                if point != batches[-1]:
                    continue  # a parameter has one gradient for all batches
                for name in [n for n in remaining if n.rpartition(".")[0] == module_name(key)]:
                    gradient, at = remaining.pop(name), (step, "gradients", name)
                    if at not in self.reference.expected:
                        continue
                    is_sharded = isinstance(gradient, DTensor) and any(
                        p.is_shard() for p in gradient.placements
                    )
                    partials = None if is_sharded else next(self.world.gather([gradient]))
                    (values,) = full_tensors([aligned[name]], self.world)
                    if self.world.is_first:
                        expected, unit = self.reference.expected[at], self.reference.units[at]
                        error = max(self._difference(value, expected) for value in values) / unit
                        location = Location(name, error)
                        comparisons.append(_Comparison(location, values[0], partials, expected, unit))
        return comparisons

    def _difference(self, value: torch.Tensor, expected: torch.Tensor) -> float:
        return self.reference.tolerance.difference(value, expected)

    def _output(self, point: str, key: str, label: str) -> _Comparison | None:
        """Compare a recorded tensor. Return None if it was not recorded or can't be assembled, and on all ranks but the
        first."""
        at = (point, "outputs", key)
        if (point, key) not in self.common or at not in self.reference.expected:
            return None
        (gathered,) = full_tensors([self.training.records[point].tensors[key]], self.world)
        if not self.world.is_first:
            return None
        expected, unit = self.reference.expected[at], self.reference.units[at]
        if self.options.degrees.cp > 1 and self._is_by_expert(point, key, expected):
            return None  # tokens sorted by expert are in another order: each CP rank sorts its local tokens
        is_partial = may_be_partial(module_name(key), self.plan.styles)
        if not is_partial and self.options.shards_tokens and self._is_one_token(expected):
            gathered = gathered[:1]  # on the stream the other ranks hold padding of the same shape
        packed, inner = packed_around(module_name(key), self.plan.styles), self.options.degrees.tp
        packings = {style.sections for style in packed.values()}
        fit = best_fit(gathered, expected, self._difference, sums=is_partial, packings=packings, inner=inner)
        if fit is None:
            return None
        partials = gathered if all(tensor.shape == expected.shape for tensor in gathered) else None
        location = Location(label, fit.error / unit, fit.how)
        return _Comparison(location, fit.values[0], partials, expected, unit)

    def _is_by_expert(self, point: str, key: str, expected: torch.Tensor) -> bool:
        """Whether an output in an MLP has tokens sorted by expert, without a sequence dimension."""
        length = self.reference.expected[point, "logits", ""].shape[self.options.sequence_dim]
        is_in_mlp = any(within(module_name(key), mlp) for mlp in self.plan.decoder.mlps)
        return is_in_mlp and length not in expected.shape

    def _is_one_token(self, expected: torch.Tensor) -> bool:
        return expected.ndim > self.options.sequence_dim and expected.shape[self.options.sequence_dim] == 1

    def first_wrong(self, direction: str, comparisons: list[_Comparison]) -> Finding | None:
        """Return the first wrong tensor and correct tensors near it; None if all are correct.

        The correct tensors come before the wrong one; in a backward they may also come after it, in the same parent
        module.
        """
        tolerance = self.reference.tolerance.allowed(self.world.mesh.size())
        is_right = [comparison.location.error <= tolerance for comparison in comparisons]
        if all(is_right):
            return None
        index = is_right.index(False)
        first = comparisons[index]
        parent = _parent(first.location.name)
        after = [
            comparison.location
            for comparison, right in zip(comparisons[index + 1 :], is_right[index + 1 :], strict=True)
            if right and direction == "backward" and _parent(comparison.location.name) == parent
        ]
        before = [comparison.location for comparison in reversed(comparisons[:index])]
        correct = [*before[: HEALTHY - bool(after)], *after][:HEALTHY]
        allowed = first.unit * tolerance
        reason = diagnose(first.value, first.partials, first.expected, allowed, self.world.mesh.size())
        remedy, name = "", first.location.name
        if reason == _UNSUMMED and name in dict(self.training.model.named_parameters()):
            order = next(iter(self.reference.orders.values()))
            remedy = summing_style(name, self.plan.styles, order, self.plan.decoder, self.options)
        needs_hint = direction == "forward" and not reason
        hint = sections_to_check(module_name(name), self.plan.styles) if needs_hint else ""
        return Finding(direction, replace(first.location, note=""), tuple(correct), reason, remedy, hint)


def diagnose(
    value: torch.Tensor,
    partials: list[torch.Tensor] | None,
    expected: torch.Tensor,
    allowed: float,
    ranks: int,
) -> str:
    """Return the fault of `value` in words if its numbers leave no doubt, else "".

    Args:
        value: the full tensor, after any sum over the ranks.
        partials: each rank's tensor before any sum over the ranks; None if they have other shapes.
        expected: the unsplit model's tensor.
        allowed: the largest difference that is rounding.
        ranks: number of ranks.
    """
    if value.shape != expected.shape:
        return f"of shape {tuple(value.shape)}, not {tuple(expected.shape)}"
    if not value.any():
        return "all zeros"
    if partials is not None and difference(torch.stack(partials).sum(0), expected) <= allowed:
        return _UNSUMMED
    ratio = ((value * expected).sum() / (expected * expected).sum()).item()
    if not math.isfinite(ratio) or difference(value, expected * ratio) > allowed * max(1.0, abs(ratio)):
        return ""
    if math.isclose(ratio, ranks, rel_tol=1e-3):
        return f"exactly {ranks} times too large: once for each rank"
    if math.isclose(ratio, 1 / ranks, rel_tol=1e-3):
        return f"exactly 1/{ranks} of the right one: divided by the number of ranks"
    return f"exactly {ratio:.4g} times the right one"


def may_be_partial(name: str, styles: Mapping[str, ParallelStyle]) -> bool:
    """Whether a module's output and its gradient may be partial: only inside a region.

    The output of a module that closes a region is summed already, and so is the stream after it.
    """
    style = styles.get(name)
    if isinstance(style, Style) and (style.closes or not style.is_inside_region):
        return False
    regions = [key for key, style in styles.items() if isinstance(style, Style) and style.opens]
    # Foreign styles do not say where regions are.
    has_foreign_styles = not all(isinstance(style, Style) for style in styles.values())
    return has_foreign_styles or any(
        name != key and name.startswith(f"{key}." if key else "") for key in regions
    )


def _parent(name: str) -> str:
    """Return the parent of the module to which a parameter or an output belongs."""
    return name.removeprefix("gradient of the output of ").rpartition(".")[0].rpartition(".")[0]
