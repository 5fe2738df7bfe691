"""Derive a plan: write it, prove it, and let the proof decide what the dataflow leaves open. Start at `derive`."""

import copy
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from titanplans.derive.analyse import ModelSplit, analyse, kernels_of
from titanplans.derive.base import shorten
from titanplans.derive.write import Choices, Source, has_split_arguments, stream_arguments, write_plan
from titanplans.errors import PlanError, UserError
from titanplans.plan.degrees import Degrees
from titanplans.plan.plan import TPPlan
from titanplans.proof import verify
from titanplans.proof.report import Report
from titanplans.split.experts.interfaces import interface_of

_MOST_PROOFS = 9
"""Proofs after which nothing else is tried."""


@dataclass(frozen=True)
class Derived:
    """A derived plan.

    Attributes:
        text: the source file of the plan's class.
        plan: the class, which is not registered.
        report: the report of the last proof; None if the last plan was refused before it ran.
        notes: which regions are not split, and why.
        proofs: the number of proofs that ran.
    """

    text: str
    plan: type[TPPlan]
    report: Report | None
    notes: tuple[str, ...]
    proofs: int

    @property
    def is_proved(self) -> bool:
        return self.report is not None and self.report.passed


def derive(
    model_fn: Callable[[], nn.Module],
    name: str = "DerivedPlan",
    *,
    other_fn: Callable[[], nn.Module] | None = None,
    degrees: Sequence[int | Degrees] | None = None,
    conditions: str = "each",
    register: str | None = None,
    exclude: Sequence[str] = (),
) -> Derived:
    """Derive a plan for a model from its dataflow, and prove it.

    Args:
        model_fn: returns the model, with random weights, on the CPU.
        name: the name of the class.
        other_fn: returns the same architecture with other sizes. None: sizes are written as attributes that have these
            values in one model, which may be chance.
        degrees: the degrees to prove, as in `verify`; None: those that the model allows.
        conditions: the conditions to prove, as in `verify`.
        register: model type for which the written class is registered; None: it is not.
        exclude: model types whose registered plans can't be the base of the class.

    Raises:
        PlanError: the unsplit model does not run, draws random numbers or overflows, or nothing in it can be split.
    """
    split = analyse(_in_float64(model_fn()))
    other = None if other_fn is None else analyse(_in_float64(other_fn()))
    if all(kind.split is None for kind in split.kinds):
        raise PlanError(_nothing_split(split))
    choices, tried, proofs = Choices(), set[Choices](), 0
    while True:
        tried.add(choices)
        source = write_plan(split, name, choices, other)
        report, reason = _prove(model_fn, source, _first_degrees(split, choices), conditions="plain")
        proofs += 1
        if not reason:
            source = shorten(source, source.execute(), split.model, exclude)
            report, reason = _prove(model_fn, source, degrees, conditions)
            proofs += 1
        if not reason or proofs >= _MOST_PROOFS:
            break
        following = [choice for choice in _reactions(split, choices, reason) if choice not in tried]
        if not following:
            break
        choices = following[0]
    text = source.render(_docstring(split, choices), register=register)
    return Derived(text, source.execute(), report, tuple(_notes(split, choices, reason)), proofs)


def _first_degrees(split: ModelSplit, choices: Choices) -> list[Degrees]:
    regions = [
        kind.module
        for kind in split.kinds
        if kind.split is not None and kind.region.name not in choices.unsplit
    ]
    has_experts = any(interface_of(module) for region in regions for module in region.modules())
    return [Degrees(tp=2), *([Degrees(tp=2, ep=2)] if has_experts and choices.by_expert else [])]


def _prove(
    model_fn: Callable[[], nn.Module],
    source: Source,
    degrees: Sequence[int | Degrees] | None,
    conditions: str,
) -> tuple[Report | None, str]:
    """Return the report of a proof, or None if the plan is refused; and why it failed, "" if it passed."""
    try:
        report = verify(model_fn, source.execute(), degrees=degrees, conditions=conditions)
    except UserError as error:
        return None, str(error)
    return report, "" if report.passed else report.table()


def _in_float64(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(torch.float64)


def _nothing_split(split: ModelSplit) -> str:
    names: dict[str, list[str]] = {}
    for kind in split.kinds:
        names.setdefault(kind.reason, []).append(kind.region.name)
    reasons = [
        f"{', '.join(dict.fromkeys(names[reason]))} can't be split, since {reason}" for reason in names
    ]
    return (
        f"no plan is derived for {type(split.model).__name__}: "
        f"{'; '.join(reasons) or 'no module of its blocks maps hidden states to hidden states of the same shape'}; "
        "write one by hand (docs/plans.md)"
    )


def _reactions(split: ModelSplit, choices: Choices, reason: str) -> list[Choices]:
    """Return what to try after a proof that failed for `reason`, best first."""
    found: list[Choices] = []
    balance = "load_balancing_loss_func"  # transformers' name
    if "adds a loss to the cross entropy" in reason and hasattr(
        sys.modules[type(split.model).__module__], balance
    ):
        found.append(replace(choices, counted_once=balance))
    closing = frozenset(kind.region.name for kind in split.kinds if kind.closes)
    key = re.search(r"plan key '([^']+)'", reason)
    relative = re.sub(r"^.*?\.\d+\.", "", key[1]) if key else ""
    if "interleaved=True" in reason and key:
        owners = [kind.region.name for kind in split.kinds if relative.startswith(f"{kind.region.name}.")]
        names = frozenset(relative.removeprefix(f"{owner}.") for owner in owners)
        found.append(replace(choices, interleaved=choices.interleaved | names))
    if "all_tokens=True" in reason:
        found.append(replace(choices, embeds_all_tokens=True))
    if gathering := re.search(r"([\w.]+) the style \S+\(may_gather=True\)", reason):
        mixers = [kind.region.name for kind in split.kinds if kind.mixes_tokens]
        names = frozenset(name for name in mixers if gathering[1].endswith(f".{name}"))
        found.append(replace(choices, may_gather=choices.may_gather | names))
    if "leave the sum to the region's exit" in reason:
        names = frozenset(name for name in closing if relative.startswith(f"{name}."))
        found.append(replace(choices, sum_at_exit=choices.sum_at_exit | names))
    place = re.search(r"(?:first wrong at|does not run, in) ([\w.]+)", reason)
    if place and place[1] in split.decoder.names and stream_arguments(split):
        found.append(replace(choices, shards_arguments=True))
    if choices.by_expert and re.search(r"\bep\b", reason):
        found.append(replace(choices, by_expert=False))
    if "shape" in reason or "view" in reason:
        found.append(replace(choices, ends_stream=True))
    found.append(replace(choices, sum_at_exit=closing))
    by_argument = frozenset(kind.region.name for kind in split.kinds if has_split_arguments(kind))
    found.append(replace(choices, unsplit=choices.unsplit | by_argument))
    found.append(replace(choices, ends_stream=True, sum_at_exit=closing))
    if place:
        name = re.sub(r"^.*?\.\d+\.", "", place[1])
        wrong = frozenset(
            kind.region.name
            for kind in split.kinds
            if name == kind.region.name or name.startswith(f"{kind.region.name}.")
        )
        found.append(replace(choices, unsplit=choices.unsplit | wrong))
    return found


def _docstring(split: ModelSplit, choices: Choices) -> list[str]:
    names = [
        kind.region.name for kind in split.kinds if kind.split is None or kind.region.name in choices.unsplit
    ]
    unsplit = f" Not split: {', '.join(dict.fromkeys(names))}." if names else ""
    kernels = dict.fromkeys(kernel for kind in split.kinds for kernel in kernels_of(kind.module))
    unseen = f"On a GPU its code may call kernels that the proof did not run: {', '.join(kernels)}."
    return [
        f"Derived from the dataflow of {type(split.model).__name__}.{unsplit}",
        *(["", *textwrap.wrap(unseen, width=110)] if kernels else []),
    ]


def _notes(split: ModelSplit, choices: Choices, reason: str) -> list[str]:
    notes = [
        f"{kind.region.name} ({type(kind.module).__name__}) is not split: {kind.reason}"
        for kind in split.kinds
        if kind.split is None
    ]
    notes += [f"{name} is not split: the proof failed with it" for name in sorted(choices.unsplit)]
    return [*notes, *([f"not proved: {reason}"] if reason else [])]
