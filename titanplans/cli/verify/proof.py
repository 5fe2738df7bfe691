"""The proof of one subject: its model is built, its plan verified, its communication counted."""

import copy
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from titanplans.apply.apply import apply_plan
from titanplans.cli.verify.prepare import check_memory, prepare
from titanplans.cli.verify.subject import Subject
from titanplans.kernels import check_cpu
from titanplans.observe.communication import Communication, count_communication
from titanplans.parallel.mesh.process_group import available_cores
from titanplans.plan.custom import PlanSource, resolve_plan
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import TPPlan
from titanplans.proof import Report, verify
from titanplans.proof.batches.sample import moved
from titanplans.proof.compare.forward import backward, call
from titanplans.proof.ranks.fake import fake_ranks, mesh_sizes
from titanplans.proof.ranks.world import is_small
from titanplans.proof.result import keywords, options_as_json
from titanplans.proof.verify import accepted_cases, degrees_to_prove
from titanplans.split.decoder import find_decoder
from titanplans.split.stages.trace import logits_of
from titanplans.training.trainer.device import no_trainer


@dataclass(frozen=True)
class Outcome:
    """The outcome of one proof."""

    subject: str
    sizes: dict[str, Any]
    ranks: str
    notes: tuple[str, ...]
    report: Report
    counts: tuple[tuple[TPOptions, Communication], ...]
    """The blocks' communication for each choice of options, which is the same at any degree."""
    seconds: float
    of: int = 0
    """The number of cases while some are left; 0 in the end."""

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON has it."""
        return {
            "subject": self.subject,
            "verdict": "unfinished" if self.of else "proved" if self.report.passed else "wrong",
            "sizes": self.sizes,
            "ranks": self.ranks,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
            "report": self.report.to_dict(),
            "communication": [
                options_as_json(options) | counted.to_dict() for options, counted in self.counts
            ],
        }


def prove(
    subject: Subject,
    request: Namespace,
    device: torch.device,
    progress: Callable[[str], None],
    watch: Callable[[Outcome], None],
    *,
    fork: bool = False,
) -> Outcome:
    """Prove `subject` as `request`, the command line, asks, on `device`.

    `progress` is called with a few words before each step, `watch` with the outcome so far after each case. With `fork` the
    cases of a small model are proved in as many processes as there are cores.
    """
    start = time.perf_counter()
    progress("the model")
    threads, processes = torch.get_num_threads(), 1
    if fork:
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
    dtype = None if request.dtype is None else getattr(torch, request.dtype)
    prepared = prepare(subject, request, device, dtype)
    model = prepared.model
    size = dist.get_world_size() if dist.is_initialized() else None
    cuts = degrees_to_prove(model, subject.degrees, size)
    # `verify` checks again; this check comes before the model takes any memory.
    accepted, _ = accepted_cases(
        model,
        subject.plan,
        cuts,
        subject.loss_parallel,
        subject.sequence_parallel,
        named=subject.degrees is not None or size is not None,
    )
    if device.type == "cpu" and isinstance(model, PreTrainedModel):
        check_cpu(model)
    copies = (
        0
        if dist.is_initialized()
        else max(options.degrees.tp_cp * options.degrees.pp for options in accepted)
    )
    check_memory(model, prepared.batch_size * prepared.seq_len, prepared.dtype, device, copies)
    if fork and is_small(model, prepared.dtype):
        processes = available_cores()
    else:
        torch.set_num_threads(threads)
    sizes = _sizes(model, resolve_plan(subject.plan, model, next(iter(accepted))))
    sizes |= {"batch_size": prepared.batch_size, "seq_len": prepared.seq_len}
    if prepared.make is not None:
        model = prepared.make()
    lacking = no_trainer()

    def outcome(
        report: Report, of: int, notes: tuple[str, ...] = prepared.notes, counts: tuple = ()
    ) -> Outcome:
        ranks = f"ranks: {report.ranks}{'' if device.type == 'cpu' else f' on one {device.type} device'}"
        if dist.is_initialized():
            ranks = f"{dist.get_world_size()} processes over {dist.get_backend()}, {device.type}"
        return Outcome(subject.words, sizes, ranks, notes, report, counts, time.perf_counter() - start, of)

    report = verify(
        lambda: model,
        subject.plan,
        degrees=subject.degrees,
        loss_parallel=subject.loss_parallel,
        sequence_parallel=subject.sequence_parallel,
        inputs=prepared.inputs,
        seq_len=prepared.seq_len,
        batch_size=prepared.batch_size,
        dtype=prepared.dtype,
        losses={"torchtitan": torchtitans_loss} if lacking is None else {},
        ranks=request.ranks,
        conditions="each" if request.quick else "pairs",
        processes=processes,
        progress=progress,
        watch=lambda report, of: watch(outcome(report, of)),
    )
    notes, counts = prepared.notes, []
    splits = any(cut.tp_cp * cut.pp > 1 for cut in cuts)
    if not splits:
        notes += ("one rank: its code and kernels are those of a split model, and nothing is split",)
    if lacking is not None:
        notes += (f"torchtitan's loss is not compared: {lacking.partition(':')[0]}",)
    if not request.quick and splits:
        progress("communication")
        plain = prepared.inputs(prepared.batch_size, prepared.seq_len, 0)
        inputs = moved(plain, device, prepared.dtype)
        counts = _counts(model, subject.plan, report, inputs)
        if any(case.options.degrees.ep > 1 for case in report.cases):
            notes += (
                "collectives with experts over ranks are not counted: how many rows are sent depends on values of all ranks",
            )
        elif report.passed and not counts and any(case.options.degrees.pp == 1 for case in report.cases):
            notes += ("collectives are not counted: there is no list of blocks to hold them against",)
    return outcome(report, 0, notes, tuple(counts))


def _counts(
    model: nn.Module, plan: PlanSource, report: Report, inputs: Mapping[str, Any]
) -> list[tuple[TPOptions, Communication]]:
    """Count the communication of the right cases of `report`, for each choice of options at the smallest degree.

    Not where experts are shared out: the ranks that it is counted on send nothing, and what they would comes of values.

    `model` is the whole one, which has never run; `inputs` are keyword arguments of its forward.
    """
    if not find_decoder(model, required=False).blocks:
        return []  # without blocks there is no bound to compare with
    chosen: dict[tuple[bool, ...], TPOptions] = {}
    for case in report.cases:
        if case.passed and case.options.degrees.ep == case.options.degrees.pp == 1:
            options = case.options
            cuts = (options.degrees.tp > 1, options.degrees.cp > 1)
            chosen.setdefault((options.loss_parallel, options.sequence_parallel, *cuts), options)
    return [(options, _count(model, plan, options, inputs)) for options in chosen.values()]


def _count(
    model: nn.Module, plan: PlanSource, options: TPOptions, inputs: Mapping[str, Any]
) -> Communication:
    device = next(model.parameters()).device
    if dist.is_initialized():
        shape = mesh_sizes(options.degrees.tp_cp, options.degrees.cp)
        made = nullcontext(init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape)))
    else:
        made = fake_ranks(options.degrees.tp_cp, options.degrees.cp, device.type)
    with made as mesh:
        split = copy.deepcopy(model)
        applied = apply_plan(split, mesh, plan=plan, **keywords(options))

        def run() -> None:
            logits = logits_of(call(split, inputs))
            labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
            backward(logits, labels, labels.numel())

        if options.degrees.cp > 1:
            call(split, inputs)  # in the first forward each projection is exchanged by itself
        return count_communication(split, applied, run, options)


def torchtitans_loss(logits: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return torchtitan's own loss, by which `titanplans.parallel.cross_entropy` is compared with it."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")  # which its loss asks for
    return cross_entropy_loss(logits, labels) / tokens


def _sizes(model: nn.Module, plan: TPPlan) -> dict[str, Any]:
    """Return the sizes of a model by name, as strict application finds them."""
    sizes: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    decoder = find_decoder(model, required=False)
    if not decoder.blocks:
        return sizes  # a plan given as a dict needs no blocks
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
