"""Prove one subject: build the model, verify its plan, count its communication. Start at `prove`."""

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
    plan: str
    """The source of the plan: `TPPlan.origin`."""
    notes: tuple[str, ...]
    report: Report
    counts: tuple[tuple[TPOptions, Communication], ...]
    """The communication of the blocks for each choice of options; it does not depend on the degree."""
    seconds: float
    total_cases: int = 0
    """The total number of cases while some are not proved yet; 0 at the end."""

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as a dict for JSON."""
        return {
            "subject": self.subject,
            "verdict": "unfinished" if self.total_cases else "proved" if self.report.passed else "wrong",
            "sizes": self.sizes,
            "ranks": self.ranks,
            "plan": self.plan,
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
    """Prove `subject`.

    Args:
        subject: the model and its plan.
        request: the options of the command line.
        device: the device of the proof.
        progress: called with a few words before each step.
        watch: called with the current outcome after each case.
        fork: prove the cases of a small model in as many processes as there are cores.
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
    degrees_tried = degrees_to_prove(model, subject.degrees, size)
    # `verify` checks this again. Here the model is still on meta, so that a refusal takes no memory.
    accepted, _ = accepted_cases(
        model,
        subject.plan,
        degrees_tried,
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
    plan = resolve_plan(subject.plan, model, next(iter(accepted)))
    sizes = _sizes(model, plan)
    sizes |= {"batch_size": prepared.batch_size, "seq_len": prepared.seq_len}
    if prepared.make is not None:
        model = prepared.make()
    no_torchtitan = no_trainer()

    def outcome(
        report: Report, total_cases: int, notes: tuple[str, ...] = prepared.notes, counts: tuple = ()
    ) -> Outcome:
        ranks = f"ranks: {report.ranks}{'' if device.type == 'cpu' else f' on one {device.type} device'}"
        if dist.is_initialized():
            ranks = f"{dist.get_world_size()} processes over {dist.get_backend()}, {device.type}"
        return Outcome(
            subject.words,
            sizes,
            ranks,
            plan.origin,
            notes,
            report,
            counts,
            time.perf_counter() - start,
            total_cases,
        )

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
        losses={"torchtitan": torchtitan_loss} if no_torchtitan is None else {},
        ranks=request.ranks,
        conditions="each" if request.quick else "pairs",
        processes=processes,
        progress=progress,
        watch=lambda report, total: watch(outcome(report, total)),
    )
    notes, counts = prepared.notes, []
    splits = any(degrees.tp_cp * degrees.pp > 1 for degrees in degrees_tried)
    if not splits:
        notes += ("one rank: it runs the code and kernels of a split model, but nothing is split",)
    if no_torchtitan is not None:
        notes += (f"torchtitan's loss is not compared: {no_torchtitan.partition(':')[0]}",)
    if not request.quick and splits:
        progress("communication")
        plain = prepared.inputs(prepared.batch_size, prepared.seq_len, 0)
        inputs = moved(plain, device, prepared.dtype)
        counts = _counts(model, subject.plan, report, inputs)
        if any(case.options.degrees.ep > 1 for case in report.cases):
            notes += (
                "collectives with expert parallelism are not counted: the number of sent tokens depends on routers' values",
            )
        elif report.passed and not counts and any(case.options.degrees.pp == 1 for case in report.cases):
            notes += ("collectives are not counted: there is no list of blocks to compute the bound for",)
    return outcome(report, 0, notes, tuple(counts))


def _counts(
    model: nn.Module, plan: PlanSource, report: Report, inputs: Mapping[str, Any]
) -> list[tuple[TPOptions, Communication]]:
    """Count the communication of the cases that passed, for each choice of options at the smallest degree.

    Cases with expert parallelism are left out: the number of tokens sent depends on values, and fake ranks have none.

    Args:
        model: the unsplit model, which has never run.
        plan: the plan that was proved.
        report: the report of the proof.
        inputs: keyword arguments of the model's forward.
    """
    if not find_decoder(model, required=False).blocks:
        return []  # without blocks there is no bound to compare with
    by_choice: dict[tuple[bool, ...], TPOptions] = {}
    for case in report.cases:
        if case.passed and case.options.degrees.ep == case.options.degrees.pp == 1:
            options = case.options
            parallelisms = (options.degrees.tp > 1, options.degrees.cp > 1)
            by_choice.setdefault((options.loss_parallel, options.sequence_parallel, *parallelisms), options)
    return [(options, _count(model, plan, options, inputs)) for options in by_choice.values()]


def _count(
    model: nn.Module, plan: PlanSource, options: TPOptions, inputs: Mapping[str, Any]
) -> Communication:
    device = next(model.parameters()).device
    if dist.is_initialized():
        shape = mesh_sizes(options.degrees.tp_cp, options.degrees.cp)
        ranks = nullcontext(init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape)))
    else:
        ranks = fake_ranks(options.degrees.tp_cp, options.degrees.cp, device.type)
    with ranks as mesh:
        split = copy.deepcopy(model)
        applied = apply_plan(split, mesh, plan=plan, **keywords(options))

        def run() -> None:
            logits = logits_of(call(split, inputs))
            labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
            backward(logits, labels, labels.numel())

        if options.degrees.cp > 1:
            # The first forward exchanges each projection of a mixer separately; later forwards exchange them together.
            call(split, inputs)
        return count_communication(split, applied, run, options)


def torchtitan_loss(logits: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return torchtitan's loss, to compare it with `titanplans.parallel.cross_entropy`."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")  # torchtitan's loss requires it
    return cross_entropy_loss(logits, labels) / tokens


def _sizes(model: nn.Module, plan: TPPlan) -> dict[str, Any]:
    """Return the sizes that the plan splits, by name, with the numbers of parameters and layers."""
    sizes: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    decoder = find_decoder(model, required=False)
    if not decoder.blocks:
        return sizes  # a plan given as a dict needs no blocks
    sizes["layers"] = len(decoder.blocks)
    head_counts: dict[str, set[int]] = {}
    for mixer in decoder.mixers.values():
        for name, count in plan.plan_of(mixer).heads(mixer).items():
            head_counts.setdefault(name, set()).add(count)
    sizes |= {
        name: min(counts) if len(counts) == 1 else sorted(counts) for name, counts in head_counts.items()
    }
    matrix = decoder.head or decoder.embedding
    if matrix is not None:
        weight = model.get_submodule(matrix)._parameters["weight"]
        assert weight is not None, matrix
        sizes |= {"vocabulary": weight.shape[0], "hidden": weight.shape[1]}
    return sizes
