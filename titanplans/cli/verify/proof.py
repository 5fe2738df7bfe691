"""One subject, proved: its model built, its plan verified, its communication counted."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from titanplans.cli.verify.arguments import Request
from titanplans.cli.verify.count import Count, count
from titanplans.cli.verify.group import Ranks
from titanplans.cli.verify.memory import check_memory
from titanplans.cli.verify.prepare import prepare
from titanplans.cli.verify.subject import Subject
from titanplans.modeling.kernels import check_cpu
from titanplans.proof import Report, verify
from titanplans.proof.grid import DEGREES
from titanplans.proof.sample import moved
from titanplans.tensor_parallel import PlanError, TPOptions, check_plan
from titanplans.tensor_parallel.custom import resolve_plan
from titanplans.tensor_parallel.decoder import find_decoder
from titanplans.tensor_parallel.plan import Plan, TPPlan

_BOTH = (True, False)


@dataclass(frozen=True)
class Outcome:
    """What came out of one proof."""

    subject: str
    sizes: dict[str, Any]
    ranks: str
    notes: tuple[str, ...]
    report: Report
    counts: tuple[Count, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON has it."""
        return {
            "subject": self.subject,
            "verdict": "proved" if self.report.passed else "wrong",
            "sizes": self.sizes,
            "ranks": self.ranks,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
            "report": self.report.to_dict(),
            "communication": [
                {
                    "degree": options.degree,
                    "loss_parallel": options.loss_parallel,
                    "sequence_parallel": options.sequence_parallel,
                    **counted.to_dict(),
                }
                for options, counted in self.counts
            ],
        }


def prove(subject: Subject, request: Request, ranks: Ranks, tell: Callable[[str], None]) -> Outcome:
    """Prove `subject` as `request` asks, on `ranks`; `tell` is called with a few words before each step.

    Raises:
        UserError: it can't be asked: the model can't be built, or needs a GPU; the plan or the degree does not fit it;
            there is not enough memory.
    """
    start = time.perf_counter()
    tell("the model")
    prepared = prepare(subject.source, request, ranks, subject.float8)
    model = prepared.model
    split = _accepted(model, subject, ranks)
    if ranks.device.type == "cpu" and isinstance(model, PreTrainedModel):
        check_cpu(model)
    tokens = prepared.batch_size * prepared.seq_len
    check_memory(model, split, tokens=tokens, dtype=prepared.dtype, ranks=ranks, built=prepared.make is None)
    sizes = _sizes(model, resolve_plan(subject.plan, model, TPOptions(min(split))))
    sizes |= {"batch_size": prepared.batch_size, "seq_len": prepared.seq_len}
    if prepared.make is not None:
        model = prepared.make()
    inputs = moved(prepared.inputs(), ranks.device, prepared.dtype)
    report = verify(
        lambda: model,
        subject.plan,
        degrees=subject.degrees,
        loss_parallel=subject.loss_parallel,
        sequence_parallel=subject.sequence_parallel,
        inputs=inputs,
        dtype=prepared.dtype,
        ranks=None if ranks.group is None else "process_group",
        progress=tell,
    )
    tell("communication")
    counts = count(model, subject.plan, report, ranks, inputs)
    notes = prepared.notes
    if report.passed and not counts:
        notes += ("collectives are not counted: there is no list of blocks to hold them against",)
    seconds = time.perf_counter() - start
    where = f"ranks: {report.ranks}" if ranks.group is None else ranks.words
    return Outcome(subject.source.words, sizes, where, notes, report, tuple(counts), seconds)


def _accepted(model: nn.Module, subject: Subject, ranks: Ranks) -> dict[int, Plan]:
    """Return the styles of each degree that strict application accepts, with some choice of options.

    `verify` asks again, for each choice. Here it is asked before the model takes any memory.
    """
    named = subject.degrees if ranks.group is None else (ranks.group,)
    losses = _BOTH if subject.loss_parallel is None else (subject.loss_parallel,)
    sequences = _BOTH if subject.sequence_parallel is None else (subject.sequence_parallel,)
    accepted: dict[int, Plan] = {}
    refused: list[PlanError] = []
    for degree in named or DEGREES:
        reasons = []
        for loss, sequence in itertools.product(losses, sequences):
            try:
                accepted[degree] = check_plan(
                    model, degree, loss_parallel=loss, sequence_parallel=sequence, plan=subject.plan
                )
                break
            except PlanError as error:
                reasons.append(error)
        if degree not in accepted:
            if named:
                raise reasons[0]
            refused += reasons
    if not accepted:
        raise refused[0]
    return accepted


def _sizes(model: nn.Module, plan: TPPlan) -> dict[str, Any]:
    """Return the sizes of a model by name: of its parts as strict application sees them."""
    sizes: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    decoder = find_decoder(model, required=False)
    if not decoder.blocks:
        return sizes  # a plan given as a dict needs no parts
    sizes["layers"] = len(decoder.blocks)
    for mixer in decoder.mixers.values():
        for name, number in plan.plan_of(mixer).heads(mixer).items():
            known = sizes.get(name)
            sizes[name] = number if known in (None, number) else sorted({number, *_list(known)})
    matrix = decoder.head or decoder.embedding
    if matrix is not None:
        weight = model.get_submodule(matrix)._parameters["weight"]
        assert weight is not None, matrix
        sizes |= {"vocabulary": weight.shape[0], "hidden": weight.shape[1]}
    return sizes


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
