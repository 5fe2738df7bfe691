"""One subject, proved: its model built, its plan verified, its communication counted."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from titanplans.cli.verify.arguments import Request
from titanplans.cli.verify.count import Count, count
from titanplans.cli.verify.group import Ranks
from titanplans.cli.verify.prepare import check_memory, prepare
from titanplans.cli.verify.subject import Subject
from titanplans.modeling.kernels import check_cpu
from titanplans.proof import Report, verify
from titanplans.proof.grid import DEGREES, accepted_cases
from titanplans.proof.sample import moved
from titanplans.tensor_parallel.custom import resolve_plan
from titanplans.tensor_parallel.decoder import find_decoder
from titanplans.tensor_parallel.plan import TPPlan


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
    named = subject.degrees if ranks.group is None else (ranks.group,)
    # `verify` asks again; here it is asked before the model takes any memory.
    accepted, _ = accepted_cases(
        model,
        subject.plan,
        named or DEGREES,
        subject.loss_parallel,
        subject.sequence_parallel,
        named=named is not None,
    )
    if ranks.device.type == "cpu" and isinstance(model, PreTrainedModel):
        check_cpu(model)
    check_memory(model, prepared.dtype, ranks)
    sizes = _sizes(model, resolve_plan(subject.plan, model, accepted[0]))
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
        losses={"torchtitan": torchtitans_loss},
        ranks=request.ranks,
        progress=tell,
    )
    tell("communication")
    counts = count(model, subject.plan, report, ranks, inputs)
    notes = prepared.notes
    if report.passed and not counts:
        notes += ("collectives are not counted: there is no list of blocks to hold them against",)
    seconds = time.perf_counter() - start
    words = ranks.words(report.ranks)
    return Outcome(subject.source.words, sizes, words, notes, report, tuple(counts), seconds)


def torchtitans_loss(logits: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the loss of torchtitan's Trainer, which `titanplans train` runs."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")  # as its Trainer does, by `titanplans.training.job`
    return cross_entropy_loss(logits, labels) / tokens


def _sizes(model: nn.Module, plan: TPPlan) -> dict[str, Any]:
    """Return the sizes of a model by name: of its parts as strict application sees them."""
    sizes: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    decoder = find_decoder(model, required=False)
    if not decoder.blocks:
        return sizes  # a plan given as a dict needs no parts
    sizes["layers"] = len(decoder.blocks)
    seen: dict[str, set[int]] = {}
    for mixer in decoder.mixers.values():
        for name, number in plan.plan_of(mixer).heads(mixer).items():
            seen.setdefault(name, set()).add(number)
    sizes |= {name: min(found) if len(found) == 1 else sorted(found) for name, found in seen.items()}
    matrix = decoder.head or decoder.embedding
    if matrix is not None:
        weight = model.get_submodule(matrix)._parameters["weight"]
        assert weight is not None, matrix
        sizes |= {"vocabulary": weight.shape[0], "hidden": weight.shape[1]}
    return sizes
