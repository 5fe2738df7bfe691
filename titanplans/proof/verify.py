"""`verify`: prove one plan and one model at every degree, with every choice of options, in every pair of conditions."""

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
from titanplans.proof.compare.pipeline import refuse_stages, refuse_unequal_stages
from titanplans.proof.compare.tolerance import check_dtype
from titanplans.proof.ranks.processes import run_in_processes
from titanplans.proof.ranks.world import Worlds, group_size
from titanplans.proof.report import Report
from titanplans.proof.result import CaseResult, Refusal, keywords
from titanplans.split.decoder import find_decoder, set_head
from titanplans.split.experts.interfaces import interface_of

DEGREES = (*(Degrees(tp=tp) for tp in (2, 4, 8)), Degrees(cp=2), Degrees(tp=2, cp=2))
"""Degrees that are proved by default, if the model allows them."""
EXPERT_DEGREES = (Degrees(tp=2, ep=2), Degrees(cp=2, ep=2))
"""Degrees that are proved by default for a model with experts that tokens can be sent to."""
STAGE_DEGREES = (Degrees(tp=2, pp=2),)
"""Degrees that are proved by default for a model with two blocks or more."""


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
    """Prove that `plan` splits a model right: train it unsplit and split, in many conditions, and compare all quantities.

    The quantities are:

    - the loss and the logits of each micro batch;
    - the gradient of every parameter after each step; it is a fault if only one of the two models has a gradient;
    - the gradient norm as a trainer computes it;
    - the weights after the last AdamW step;
    - replicas, which must be equal on all ranks;
    - the logits of an evaluation and of a forward with a cache;
    - whether tied weights are still one tensor.

    titanplans/proof/compare/tolerance.py derives the tolerances. titanplans/proof/batches/cover.py defines the trainings
    and chooses the cases. A case that fails is proved again with fewer conditions, to find the conditions that it needs.

    The model runs in training mode. Its parameters get random values first (titanplans/proof/batches/sample.py), since
    initial zeros and ones would hide mistakes.

    Args:
        model_fn: returns the model, with real weights, on the CPU or on the GPU that all ranks share. In a process group,
            it returns the model on the device of this process's rank. Called once.
        plan: as in `apply_plan`; None: the registered plan.
        degrees: the degrees to prove; an integer is a tensor-parallel degree. None: the degrees in `DEGREES`,
            `EXPERT_DEGREES` and `STAGE_DEGREES` that the model allows; in a process group, the tensor-parallel degree that
            equals the group's size. A process group of 1 rank runs the split model's code and kernels, but splits nothing.
        loss_parallel: True or False. None: both values; only one value without tensor parallelism, since it then changes
            nothing.
        sequence_parallel: as for loss_parallel.
        sequence_dim: the dimension of the sequence in the hidden states.
        inputs: inputs of the model's forward. A function of batch size, sequence length and seed that returns keyword
            arguments, with tensors on any device; or fixed keyword arguments, the same for every batch; or None for token
            ids.
        seq_len: tokens in a plain sequence; other sequences are longer or shorter.
        batch_size: sequences in a plain batch; other batches have one more, or only one.
        dtype: dtype of weights and activations, float64 or float32. A few cases are in lower precision.
        seed: seed of weights, tokens and labels.
        losses: further losses by name, each a function of logits, labels and the number of labels. Their values and
            their gradients with respect to the logits are compared. The loss whose backward runs through the model is
            `titanplans.parallel.cross_entropy`.
        ranks: "threads": all ranks in this process, on the CPU or one GPU. Each rank starts with a full copy of the model,
            so prove a large model with fewer blocks and a smaller vocabulary. "process_group": one rank in each process of
            the default group; all of them call this and get the same report.
        conditions: "pairs": cases that cover every pair of conditions. "each": every condition once, at the smallest
            degree. "plain": one step of one batch with every choice of options.
        processes: number of processes that prove cases, forked if more than 1 (titanplans/proof/ranks/processes.py).
        progress: called with a few words before each step.
        watch: called after each case with the report so far, in which the newest case is the last, and the number of all
            cases. Failing cases are explained after all cases are proved.

    Raises:
        PlanError: the plan does not fit the model; a named degree is refused; no degree is accepted; the unsplit model
            does not run, at all or in this dtype; ranks that are threads can't run on its device.
        VerifyError: the plan changes code that the unsplit model runs, too.
    """
    check_dtype(dtype)
    if conditions not in CONDITIONS:
        raise PlanError(f"conditions = {conditions!r}: {either(list(CONDITIONS))}")
    if processes < 1 or (processes > 1 and ranks == "process_group"):
        raise PlanError(
            f"processes = {processes}: give 1 or more; over a process group give 1, since its ranks are processes already"
        )
    progress = progress or (lambda words: None)
    size = group_size() if ranks == "process_group" else None
    model = model_fn().to(dtype).train()
    to_prove = degrees_to_prove(model, degrees, size)
    has_named_degrees = degrees is not None or size is not None
    if any(param.is_meta for param in model.parameters()):
        raise PlanError(f"{type(model).__name__} has parameters on meta: let model_fn make real ones")
    with exact_float8(model, dtype), Worlds(ranks, model) as worlds:
        # On a copy, since a plan is code and must not change the unsplit model.
        accepted, refused = accepted_cases(
            _copy_on_meta(model),
            plan,
            to_prove,
            loss_parallel,
            sequence_parallel,
            sequence_dim,
            named=has_named_degrees,
        )
        set_head(model, head_of(next(iter(accepted.values())), dict(model.named_modules())))
        randomise(model, seed)
        if ranks == "process_group":
            _broadcast(model)
        plan_name = type(resolve_plan(plan, model, next(iter(accepted)))).__name__
        plain = Scenario(((MicroBatch(size=batch_size, length=seq_len),),), dtype=_name(dtype))
        sampler = Sampler(model, inputs, sequence_dim, seed)
        accepted, refused_stages = _with_equal_stages(
            model, accepted, sampler.tokens(plain.steps[0][0], 0), has_named_degrees
        )
        refused += refused_stages
        proof = Proof(model, plan, sampler, seed, losses, worlds, progress)
        cases, trainings = proof.cases(accepted, plain, conditions)
        groups = by_reference(cases)
        results: dict[int, CaseResult] = {}
        subject = f"{type(model).__name__}, {plan_name}"
        report = Report(subject, _name(dtype), (), tuple(refused), trainings, ranks=ranks)

        def on_result(update: tuple[int, CaseResult]) -> None:
            index, result = update
            results[index] = result
            if watch is not None:
                watch(replace(report, cases=tuple(results.values())), len(cases))

        for explained, uncovered in run_in_processes(
            partial(proof.run, cases, groups, plain), len(groups), processes, on_result
        ):
            results |= explained
            proof.uncovered += uncovered
    in_order = tuple(results[index] for index in range(len(cases)))
    return replace(report, cases=in_order, uncovered=tuple(dict.fromkeys(proof.uncovered)))


def _with_equal_stages(
    model: nn.Module, accepted: Mapping[TPOptions, Plan], inputs: Mapping[str, Any], named: bool
) -> tuple[dict[TPOptions, Plan], list[Refusal]]:
    """Return the `accepted` options whose stages compute what the model computes, and a refusal for all others.

    Raises:
        PlanError: stages compute something else than the model, and the caller `named` the degrees or no options are left.
    """
    remaining, refused = dict(accepted), list[Refusal]()
    for pp in {options.degrees.pp for options in accepted} - {1}:
        try:
            refuse_unequal_stages(model, pp, inputs)
        except PlanError as error:
            with_stages = tuple(options for options in accepted if options.degrees.pp == pp)
            remaining = {
                options: styles for options, styles in remaining.items() if options not in with_stages
            }
            if named or not remaining:
                raise
            refused.append(Refusal(with_stages, str(error)))
    return remaining, refused


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def accepted_cases(
    model: nn.Module,
    plan: PlanSource,
    degrees: Sequence[Degrees],
    loss_parallel: bool | None,
    sequence_parallel: bool | None,
    sequence_dim: int = 1,
    *,
    named: bool,
) -> tuple[dict[TPOptions, Plan], list[Refusal]]:
    """Return the options that the plan's checks accept, with their styles, and the refused options.

    Args:
        model: a copy of the unsplit model, which may be on meta.
        plan: as in `verify`.
        degrees: the degrees to try, with each choice of options.
        loss_parallel: as in `verify`.
        sequence_parallel: as in `verify`.
        sequence_dim: as in `verify`.
        named: the caller named the degrees, so each must be accepted with some choice of options.

    Raises:
        PlanError: no options are accepted, or none of a named degree.
        VerifyError: the plan changes code that the unsplit model runs, too.
    """
    grid = [
        TPOptions(each, loss, sequence, sequence_dim)
        for each in degrees
        for loss, sequence in itertools.product(
            *(_choices(requested, each) for requested in (loss_parallel, sequence_parallel))
        )
    ]
    accepted: dict[TPOptions, Plan] = {}
    refused, errors = [], []
    with unpatched(model):
        for each, group in itertools.groupby(grid, key=lambda options: options.degrees):
            by_reason: dict[str, list[TPOptions]] = {}
            for options in group:
                try:
                    refuse_stages(model, each.pp)
                    accepted[options] = check_plan(model, each, plan=plan, **keywords(options))
                except PlanError as error:
                    errors.append(error)
                    by_reason.setdefault(str(error), []).append(options)
            if named and not any(options.degrees == each for options in accepted):
                raise errors[-1]
            refused += [Refusal(tuple(all_options), reason) for reason, all_options in by_reason.items()]
    if not accepted:
        raise errors[0]
    return accepted, refused


def degrees_to_prove(
    model: nn.Module, degrees: Sequence[int | Degrees] | None, size: int | None = None
) -> tuple[Degrees, ...]:
    """Return the degrees to prove.

    Args:
        model: unsplit.
        degrees: as in `verify`.
        size: size of the process group; None: ranks are threads.

    Raises:
        PlanError: degrees split nothing, need another number of ranks, or their ep does not divide the ranks.
    """
    if degrees is None and size is not None:
        return (Degrees(tp=size),)
    if degrees is None:
        has_stages = len(find_decoder(model, required=False).blocks) > 1
        has_experts = any(interface_of(module) is not None for module in model.modules())
        return DEGREES + EXPERT_DEGREES * has_experts + STAGE_DEGREES * has_stages
    to_prove = tuple(each if isinstance(each, Degrees) else Degrees(tp=each) for each in degrees)
    for each in to_prove:
        if each.tp_cp % each.ep:
            works = [n for n in range(1, each.tp_cp + 1) if each.tp_cp % n == 0]
            raise PlanError(
                f"ep = {each.ep}: it does not divide tp x cp = {each.tp} x {each.cp}, the proof's ranks: {either(works)} "
                "would work"
            )
        if size is not None and each.pp > 1:
            raise PlanError(
                f"degrees = {each}: stages are proved on ranks that are threads, which hold all of them: leave ranks out"
            )
        if size is not None and each.tp_cp != size:
            raise PlanError(
                f"degrees = {each}, but the process group has {size} ranks and proves degree {size} only: start as many "
                "processes as tp x cp, or leave ranks out"
            )
    if not to_prove or (size is None and min(each.tp_cp * each.pp for each in to_prove) == 1):
        raise PlanError(
            f"degrees = [{', '.join(map(str, to_prove))}]: nothing is split, so nothing can be proved: name degrees of 2 "
            "or more ranks"
        )
    return to_prove


def _choices(requested: bool | None, degrees: Degrees) -> tuple[bool, ...]:
    """Return the values of an option to prove: the requested one, else both, or one if it changes nothing without TP."""
    if requested is not None:
        return (requested,)
    return (True,) if degrees.tp == 1 and max(degrees.cp, degrees.pp) > 1 else (True, False)


def _copy_on_meta(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        values = {
            id(tensor): nn.Parameter(tensor.to("meta"), tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else tensor.to("meta")
            for tensor in itertools.chain(model.parameters(), model.buffers())
        }
    return copy.deepcopy(model, values)


def _broadcast(model: nn.Module) -> None:
    # `model_fn` may draw different values on each rank.
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
