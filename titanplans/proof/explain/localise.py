"""Where a failing case goes wrong first, and how: each module's output and its gradient are compared.

This is a pointer for the reader; the verdict does not rest on it: the ranks' tensors are assembled in the way that fits
best (titanplans/proof/compare/assemble.py).
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
from titanplans.proof.ranks.world import World, from_first, wholes
from titanplans.proof.result import CaseResult, Finding, Location, epsilons
from titanplans.split.decoder import within
from titanplans.styles.base import Style

_UNSUMMED = "each rank has its own share: not summed over the ranks"

HEALTHY = 2
"""How many right places are named with a wrong one."""


class _Seen(NamedTuple):
    """A place, and the tensors compared there."""

    place: Location
    value: torch.Tensor
    """The first rank's whole tensor, or the one that all share."""
    held: list[torch.Tensor] | None
    """Each rank's own tensor, if it may be a part of a sum."""
    expected: torch.Tensor
    unit: float


def localise(
    training: TrainingRun,
    plan: ResolvedPlan,
    reference: ReferenceRun,
    world: World,
    case: CaseResult,
) -> CaseResult:
    """Return the failing `case` with the place where the split model differs first: in the forward, or else in the backward.

    Both trainings are recorded, the split model's as far as it came.
    """
    search = _Search(training, plan, reference, world, case.options)
    finding = from_first(world, search.first_off("forward", search.outputs()))
    if finding is None and case.checks[0].what != "runs":
        finding = from_first(world, search.first_off("backward", search.gradients()))
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
    """Yield the faults that are not differences of size."""
    yield from case.notes
    yield from (f"{name}: no gradient, and the whole model has one" for name in case.missing)
    yield from (f"{name}: a gradient, and the whole model has none" for name in case.unexpected)
    for check in case.checks:
        if not check.passed and check.what == "tied":
            yield f"{check.where}: no longer one tensor"
        if not check.passed and check.what == "replicas":
            yield f"{check.where}: differs between the ranks"


@dataclass
class _Search:
    """The outputs of the split model's modules and of the whole one's. Arguments as in `localise`."""

    training: TrainingRun
    plan: ResolvedPlan
    reference: ReferenceRun
    world: World
    options: TPOptions

    def __post_init__(self) -> None:
        # A rank that broke off has recorded less than the others.
        mine = {(point, key) for point, record in self.training.records.items() for key in record.tensors}
        self.common = set.intersection(*self.world.gather_objects(mine))

    def outputs(self) -> list[_Seen]:
        """Return each module's output, in the order in which they finished."""
        found = (
            self._output(point, key, key) for point, order in self.reference.orders.items() for key in order
        )
        return [seen for seen in found if seen is not None]

    def gradients(self) -> list[_Seen]:
        """Return, from the loss back, the gradient of each module's output and then of its own parameters.

        Of the newest step, since the first difference ends a training. A parameter has one gradient for all batches.
        """
        left = dict(self.training.raw)
        parameters = self.training.model.named_parameters()
        aligned = {name: param.grad for name, param in parameters if param.grad is not None}
        batches = [point for point in self.training.records if ", batch " in point]
        step = batches[-1].partition(",")[0]
        batches = [point for point in batches if point.startswith(f"{step},")]
        places: list[_Seen] = []
        for point in batches:
            for key in reversed(self.reference.orders[point]):
                seen = self._output(point, gradient_key(key), f"gradient of the output of {key}")
                if seen is not None:
                    places.append(seen)
                if point != batches[-1]:
                    continue
                for name in [n for n in left if n.rpartition(".")[0] == module_name(key)]:
                    gradient, at = left.pop(name), (step, "gradients", name)
                    if at not in self.reference.expected:
                        continue
                    sharded = isinstance(gradient, DTensor) and any(p.is_shard() for p in gradient.placements)
                    held = None if sharded else next(self.world.gather([gradient]))
                    (values,) = wholes([aligned[name]], self.world)
                    if self.world.first:
                        expected, unit = self.reference.expected[at], self.reference.units[at]
                        error = max(self._apart(value, expected) for value in values) / unit
                        places.append(_Seen(Location(name, error), values[0], held, expected, unit))
        return places

    def _apart(self, value: torch.Tensor, expected: torch.Tensor) -> float:
        return self.reference.tolerance.difference(value, expected)

    def _output(self, point: str, key: str, label: str) -> _Seen | None:
        """Return the place of a recorded tensor; None if it was not recorded, or can't be assembled."""
        at = (point, "outputs", key)
        if (point, key) not in self.common or at not in self.reference.expected:
            return None
        (held,) = wholes([self.training.records[point].tensors[key]], self.world)
        if not self.world.first:
            return None
        expected, unit = self.reference.expected[at], self.reference.units[at]
        if self.options.degrees.cp > 1 and self._is_by_expert(point, key, expected):
            return None  # each rank sorts the rows of its own tokens
        partial = may_be_partial(module_name(key), self.plan.styles)
        if not partial and self.options.shards_tokens and self._is_one_token(expected):
            held = held[:1]  # on the stream the other ranks hold padding of the same shape
        packed, inner = packed_around(module_name(key), self.plan.styles), self.options.degrees.tp
        packings = {style.sections for style in packed.values()}
        fit = best_fit(held, expected, self._apart, sums=partial, packings=packings, inner=inner)
        if fit is None:
            return None
        parts = held if all(one.shape == expected.shape for one in held) else None
        return _Seen(Location(label, fit.error / unit, fit.how), fit.values[0], parts, expected, unit)

    def _is_by_expert(self, point: str, key: str, expected: torch.Tensor) -> bool:
        """Whether an output in an MLP has rows of experts, and not tokens."""
        tokens = self.reference.expected[point, "logits", ""].shape[self.options.sequence_dim]
        inside = any(within(module_name(key), mlp) for mlp in self.plan.decoder.mlps)
        return inside and tokens not in expected.shape

    def _is_one_token(self, expected: torch.Tensor) -> bool:
        return expected.ndim > self.options.sequence_dim and expected.shape[self.options.sequence_dim] == 1

    def first_off(self, direction: str, seen: list[_Seen]) -> Finding | None:
        """Return the first wrong place, with right ones near it: before it, or after it in the same module."""
        tolerance = self.reference.tolerance.allowed(self.world.mesh.size())
        right = [one.place.error <= tolerance for one in seen]
        if all(right):
            return None
        at = right.index(False)
        first = seen[at]
        after = [
            one.place
            for one, well in zip(seen[at + 1 :], right[at + 1 :], strict=True)
            if well and direction == "backward" and _parent(one.place.name) == _parent(first.place.name)
        ]
        before = [one.place for one in reversed(seen[:at])]
        healthy = [*before[: HEALTHY - bool(after)], *after][:HEALTHY]
        allowed = first.unit * tolerance
        reason = diagnose(first.value, first.held, first.expected, allowed, self.world.mesh.size())
        remedy, name = "", first.place.name
        if reason == _UNSUMMED and name in dict(self.training.model.named_parameters()):
            order = next(iter(self.reference.orders.values()))
            remedy = summing_style(name, self.plan.styles, order, self.plan.decoder, self.options)
        unclear = direction == "forward" and not reason
        hint = sections_to_check(module_name(name), self.plan.styles) if unclear else ""
        return Finding(direction, replace(first.place, note=""), tuple(healthy), reason, remedy, hint)


def diagnose(
    value: torch.Tensor, held: list[torch.Tensor] | None, expected: torch.Tensor, allowed: float, ranks: int
) -> str:
    """Return the fault of `value` in words, if its numbers leave no doubt; else "".

    Args:
        value: whole, as its next reader gets it.
        held: each rank's tensor before any sum over the ranks, if all have that shape.
        expected: the right one.
        allowed: the largest difference that is rounding.
        ranks: the degree.
    """
    if value.shape != expected.shape:
        return f"of shape {tuple(value.shape)}, not {tuple(expected.shape)}"
    if not value.any():
        return "all zeros"
    if held is not None and difference(torch.stack(held).sum(0), expected) <= allowed:
        return _UNSUMMED
    ratio = ((value * expected).sum() / (expected * expected).sum()).item()
    if not math.isfinite(ratio) or difference(value, expected * ratio) > allowed * max(1.0, abs(ratio)):
        return ""
    if math.isclose(ratio, ranks, rel_tol=1e-3):
        return f"exactly {ranks} times too large: once for each rank"
    if math.isclose(ratio, 1 / ranks, rel_tol=1e-3):
        return f"exactly 1/{ranks} of it: divided by the number of ranks"
    return f"exactly {ratio:.4g} times the right one"


def may_be_partial(name: str, styles: Mapping[str, ParallelStyle]) -> bool:
    """Whether a module's output, and its gradient, may be a part of a sum on each rank: only inside a region.

    A module that closes a region, or works on the stream behind it, has the sum itself.
    """
    style = styles.get(name)
    if isinstance(style, Style) and (style.closes or not style.is_inside_region):
        return False
    regions = [key for key, style in styles.items() if isinstance(style, Style) and style.opens]
    foreign = not all(isinstance(style, Style) for style in styles.values())  # does not say where regions are
    return foreign or any(name != key and name.startswith(f"{key}." if key else "") for key in regions)


def _parent(name: str) -> str:
    """Return the module that holds the module of a parameter, or of an output."""
    return name.removeprefix("gradient of the output of ").rpartition(".")[0].rpartition(".")[0]
