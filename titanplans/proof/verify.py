"""`verify`: every degree and every choice of options of one plan and one model, in every pair of conditions."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanplans.apply.apply import check_plan
from titanplans.errors import PlanError, either
from titanplans.plan.custom import PlanSource, resolve_plan
from titanplans.plan.degrees import Degrees
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import Plan
from titanplans.plan.resolve import head_of
from titanplans.proof.batches.conditions import MicroBatch, Scenario
from titanplans.proof.batches.sample import Inputs, Sampler, randomise
from titanplans.proof.cases import CONDITIONS, Proof, by_reference
from titanplans.proof.compare.float8 import exact_float8
from titanplans.proof.compare.forward import Loss
from titanplans.proof.compare.patches import unpatched
from titanplans.proof.compare.pipeline import refuse_other_stages, refuse_stages
from titanplans.proof.compare.tolerance import check_dtype
from titanplans.proof.ranks.processes import run_in_processes
from titanplans.proof.ranks.world import Worlds, group_size
from titanplans.proof.report import Report
from titanplans.proof.result import CaseResult, Refusal, keywords
from titanplans.split.decoder import find_decoder, set_head
from titanplans.split.experts.interfaces import interface_of

CUTS = (*(Degrees(tp=tp) for tp in (2, 4, 8)), Degrees(cp=2), Degrees(tp=2, cp=2))
EXPERTS = (Degrees(tp=2, ep=2), Degrees(cp=2, ep=2))
"""Proved by default, where the model allows them; the latter of a model with experts that can be sent rows."""
STAGES = (Degrees(tp=2, pp=2),)
"""Likewise, of a model with two blocks or more."""
BOTH = (True, False)


def verify(
    model_fn: Callable[[], nn.Module],
    plan: PlanSource = None,
    *,
    degrees: Sequence[int | Degrees] | None = None,
    loss_parallel: bool | None = None,
    sequence_parallel: bool | None = None,
    sequence_dim: int = 1,
    inputs: Inputs = None,
    seq_len: int = 16,
    batch_size: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    losses: Mapping[str, Loss] | None = None,
    ranks: str = "threads",
    conditions: str = "pairs",
    processes: int = 1,
    progress: Callable[[str], None] | None = None,
    watch: Callable[[Report, int], None] | None = None,
) -> Report:
    """Prove that `plan` splits a model right: train it whole and split, in many conditions, and compare each quantity.

    Quantities: the loss and the logits of each micro batch; the gradient of every parameter after each step (one that is
    missing fails, and so does one that the whole model does not have); the gradient norm as a trainer computes it; the
    weights after the last AdamW step; replicas, which must be equal on all ranks; the logits of an evaluation and of a
    forward with a cache; and whether tied weights are still one tensor. titanplans/proof/compare/tolerance.py derives the
    tolerances; titanplans/proof/batches/conditions.py lists the trainings and cover.py chooses the cases. A case that
    fails is proved again with fewer conditions, until the report can name the ones it needs.

    The model runs in training mode. Its parameters get new values first (titanplans/proof/batches/sample.py): initial
    zeros and ones would hide wrong paths.

    Args:
        model_fn: makes the model, with real weights, on the CPU or on the GPU that all ranks share (over a process
            group on the device of its rank). Called once.
        plan: as in `apply_plan`; None for the registered one.
        degrees: tp, cp, ep and pp of each cut to prove; a number is that of tp alone. None: those of `CUTS`, `EXPERTS` and
            `STAGES` that the model allows, or over a process group its size. A group of 1 runs the split model's code and
            kernels, and splits nothing.
        loss_parallel: True or False; None for both where weights are cut, else they are the same.
        sequence_parallel: likewise.
        sequence_dim: the sequence's dimension in the hidden states.
        inputs: of the model's forward: a function of batch size, sequence length and seed that returns keyword
            arguments, tensors on any device; or fixed keyword arguments, the same for every batch; None for token ids.
        seq_len: tokens in a plain sequence; some are longer and some shorter.
        batch_size: sequences in a plain batch; some have one more, some only one.
        dtype: of weights and activations: float64 or float32. A few cases are in lower precision.
        seed: of weights, tokens and labels.
        losses: further ones, by name, each a function of logits, labels and the number of labels: their values and
            their gradients at the logits are compared. The loss whose backward runs through the model is
            `titanplans.parallel.cross_entropy`.
        ranks: "threads": all ranks in this process, on the CPU or one GPU; each begins with a whole copy of the model:
            of a large one, prove fewer blocks and a smaller vocabulary; "process_group": one rank in each process of
            the default group; each calls this and gets the same report.
        conditions: "pairs": cases that cover every pair of them; "each": every one, at the smallest degree; "plain": one
            step of one batch at every choice of options.
        processes: how many prove cases, by forks if several: see titanplans/proof/ranks/processes.py.
        progress: called with a few words before each step.
        watch: called after each case with the report so far, the newest case last, and the number of cases. Failing
            cases are explained once all are proved.

    Raises:
        PlanError: the plan does not fit the model; a named degree is refused; no degree is accepted; the whole model does
            not run, or not in this dtype; threads can't run on its device.
        VerifyError: the plan changes code that the whole model runs, too.
    """
    check_dtype(dtype)
    if conditions not in CONDITIONS:
        raise PlanError(f"conditions = {conditions!r}: {either(list(CONDITIONS))}")
    if processes < 1 or (processes > 1 and ranks == "process_group"):
        raise PlanError(
            f"processes = {processes}: 1 or more; 1 over a process group, whose ranks are processes"
        )
    progress = progress or (lambda words: None)
    size = group_size() if ranks == "process_group" else None
    model = model_fn().to(dtype).train()
    cuts = cuts_of(model, degrees, size)
    if any(param.is_meta for param in model.parameters()):
        raise PlanError(f"{type(model).__name__} has parameters on meta: let model_fn make real ones")
    with exact_float8(model, dtype), Worlds(ranks, model) as worlds:
        # On a copy: a plan is code, and must not change the whole model.
        accepted, refused = accepted_cases(
            _without_values(model),
            plan,
            cuts,
            loss_parallel,
            sequence_parallel,
            sequence_dim,
            named=degrees is not None or size is not None,
        )
        set_head(model, head_of(next(iter(accepted.values())), dict(model.named_modules())))
        randomise(model, seed)
        if ranks == "process_group":
            _share(model)
        plan_name = type(resolve_plan(plan, model, next(iter(accepted)))).__name__
        plain = Scenario(((MicroBatch(size=batch_size, length=seq_len),),), dtype=_name(dtype))
        sampler = Sampler(model, inputs, sequence_dim, seed)
        named = degrees is not None or size is not None
        accepted, other_stages = _with_equal_stages(
            model, accepted, sampler.tokens(plain.steps[0][0], 0), named
        )
        refused += other_stages
        proof = Proof(model, plan, sampler, seed, losses, worlds, progress)
        cases, trained = proof.cases([*accepted], plain, conditions)
        groups = by_reference(cases)
        results: dict[int, CaseResult] = {}
        subject = f"{type(model).__name__}, {plan_name}"
        report = Report(subject, _name(dtype), (), tuple(refused), trained, ranks=ranks)

        def heard(news: tuple[int, CaseResult]) -> None:
            results[news[0]] = news[1]
            if watch is not None:
                watch(replace(report, cases=tuple(results.values())), len(cases))

        for proved, unreached in run_in_processes(
            partial(proof.run, cases, groups, plain), len(groups), processes, heard
        ):
            results |= proved
            proof.unreached += unreached
    proved_all = tuple(results[at] for at in range(len(cases)))
    return replace(report, cases=proved_all, unreached=tuple(dict.fromkeys(proof.unreached)))


def _with_equal_stages(
    model: nn.Module, accepted: Mapping[TPOptions, Plan], inputs: Mapping[str, Any], named: bool
) -> tuple[dict[TPOptions, Plan], list[Refusal]]:
    """Return the cases whose stages compute what the unsplit model computes, and the refused ones.

    Raises:
        PlanError: degrees were `named`, or no case is left.
    """
    left, refused = dict(accepted), list[Refusal]()
    for number in {options.degrees.pp for options in accepted} - {1}:
        try:
            refuse_other_stages(model, number, inputs)
        except PlanError as error:
            those = tuple(options for options in accepted if options.degrees.pp == number)
            left = {options: styles for options, styles in left.items() if options not in those}
            if named or not left:
                raise
            refused.append(Refusal(those, str(error)))
    return left, refused


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def accepted_cases(
    model: nn.Module,
    plan: PlanSource,
    cuts: Sequence[Degrees],
    loss_parallel: bool | None,
    sequence_parallel: bool | None,
    sequence_dim: int = 1,
    *,
    named: bool,
) -> tuple[dict[TPOptions, Plan], list[Refusal]]:
    """Return the cases that strict application accepts, with their styles, and the refused ones. Arguments as in `verify`.

    Args:
        named: the degrees were named, so each must be accepted with some choice of options.

    Raises:
        PlanError: no case is accepted, or none of a named degree.
        VerifyError: the plan changes code that the whole model runs, too.
    """
    grid = [
        TPOptions(cut, loss, sequence, sequence_dim)
        for cut in cuts
        for loss, sequence in itertools.product(
            *(_choices(asked, cut) for asked in (loss_parallel, sequence_parallel))
        )
    ]
    accepted: dict[TPOptions, Plan] = {}
    refused, errors = [], []
    with unpatched(model):
        for cut, group in itertools.groupby(grid, key=lambda options: options.degrees):
            reasons: dict[str, list[TPOptions]] = {}
            for options in group:
                try:
                    refuse_stages(model, cut.pp)
                    accepted[options] = check_plan(model, cut, plan=plan, **keywords(options))
                except PlanError as error:
                    errors.append(error)
                    reasons.setdefault(str(error), []).append(options)
            if named and not any(options.degrees == cut for options in accepted):
                raise errors[-1]
            refused += [Refusal(tuple(those), reason) for reason, those in reasons.items()]
    if not accepted:
        raise errors[0]
    return accepted, refused


def cuts_of(
    model: nn.Module, degrees: Sequence[int | Degrees] | None, size: int | None = None
) -> tuple[Degrees, ...]:
    """Return the cuts to prove: those of `degrees`, as in `verify`; `size` is that of the process group, if there is one.

    Raises:
        PlanError: a cut splits nothing, is of another number of ranks, or of more experts than ranks.
    """
    if degrees is None and size is not None:
        return (Degrees(tp=size),)
    if degrees is None:
        stages = STAGES * (len(find_decoder(model, required=False).blocks) > 1)
        return CUTS + EXPERTS * any(interface_of(module) is not None for module in model.modules()) + stages
    cuts = tuple(one if isinstance(one, Degrees) else Degrees(tp=one) for one in degrees)
    for cut in cuts:
        if cut.tp_cp % cut.ep:
            works = [n for n in range(1, cut.tp_cp + 1) if cut.tp_cp % n == 0]
            raise PlanError(
                f"ep = {cut.ep}: it does not divide tp x cp = {cut.tp} x {cut.cp}, the proof's ranks: {either(works)} would "
                "work"
            )
        if size is not None and cut.pp > 1:
            raise PlanError(
                f"degrees = {cut}: stages are proved on ranks that are threads, which hold all of them: leave ranks out"
            )
        if size is not None and cut.tp_cp != size:
            raise PlanError(
                f"degrees = {cut}, but the process group has {size} ranks and proves degree {size} only: start as many "
                "processes as tp x cp, or leave ranks out"
            )
    if not cuts or (size is None and min(cut.tp_cp * cut.pp for cut in cuts) == 1):
        raise PlanError(
            f"degrees = [{', '.join(map(str, cuts))}]: nothing is split, so nothing can be proved: name degrees of 2 "
            "or more"
        )
    return cuts


def _choices(asked: bool | None, cut: Degrees) -> tuple[bool, ...]:
    """Return the values of an option to prove: the one asked for, else both, or one where it changes nothing (no TP)."""
    if asked is not None:
        return (asked,)
    return (True,) if cut.tp == 1 and max(cut.cp, cut.pp) > 1 else BOTH


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy of `model` on meta."""
    with torch.no_grad():
        values = {
            id(tensor): nn.Parameter(tensor.to("meta"), tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else tensor.to("meta")
            for tensor in itertools.chain(model.parameters(), model.buffers())
        }
    return copy.deepcopy(model, values)


def _share(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers: `model_fn` may draw different ones on each rank."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
