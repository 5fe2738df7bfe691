"""One case: the split model's training is compared with the unsplit model's. Start at `prove_case`."""

import copy
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from titanplans.apply.apply import AppliedPlan, apply_plan
from titanplans.errors import PlanError, VerifyError
from titanplans.plan.custom import PlanSource
from titanplans.plan.options import TPOptions
from titanplans.proof.batches.conditions import Scenario
from titanplans.proof.compare.comparison import Comparison
from titanplans.proof.compare.forward import FAILURES, first_line
from titanplans.proof.compare.patches import unpatched
from titanplans.proof.compare.pipeline import PipelinedModel, split_stages
from titanplans.proof.compare.reference import ReferenceRun
from titanplans.proof.compare.training import TrainingRun, recompute
from titanplans.proof.explain.localise import localise
from titanplans.proof.ranks.lockstep import RanksDiverged
from titanplans.proof.ranks.world import World, from_first
from titanplans.proof.result import CaseResult, Check, keywords
from titanplans.styles.base import Style

SPLITTING = "while it is split"

_RANK_QUERY = (
    "{} calls torch.distributed.get_rank(), the global rank, which with data parallelism differs from the rank in the "
    "mesh: use mesh.get_local_rank()"
)


class _TrainingFailed(Exception):
    """The split model's training raised an error. Arguments: where in the training, and the error in one line."""


def prove_case(
    reference: ReferenceRun, plan: PlanSource, options: TPOptions, scenario: Scenario, world: World
) -> CaseResult:
    """Prove `plan` with `options`. Every rank of `world` calls this, and gets the first rank's result.

    An error in the split model's training fails the case. If the `reference` is recorded, the result of a failing case
    names the first module that differs.

    Raises:
        PlanError: the plan's checks refuse it.
    """
    start = time.perf_counter()
    applied: list[AppliedPlan] = []
    training: TrainingRun | None = None
    comparison = Comparison(reference, world)

    def train_and_compare() -> CaseResult:
        nonlocal applied, training
        try:
            model = copy.deepcopy(reference.pristine)
            if scenario.differing and not world.is_first:
                _perturb_weights(model, world.mesh.get_local_rank())
            model, applied = split(model, plan, options, world, reference)
            if scenario.recomputed:
                for stage in applied:
                    recompute(stage.decoder)
            training = reference.training(model, fused=scenario.fused)
            comparison.run(training)
        except (PlanError, VerifyError):
            raise
        except FAILURES as error:
            raise _TrainingFailed(_place(training), first_line(error) + _remedy(training, applied)) from error
        return comparison.result(options, scenario)

    try:
        result = world.together(train_and_compare)
    except _TrainingFailed as failure:
        result = _failed(options, scenario, *failure.args)
    except RanksDiverged as error:
        result = _failed(options, scenario, _place(training), first_line(error))
    result = from_first(world, result)
    if not result.passed and reference.recording and training is not None:
        # If the training failed, use what it recorded until then. New names, since the closure below needs values that do
        # not change.
        recorded, case = training, result
        resolved = recorded.model.plan if isinstance(recorded.model, PipelinedModel) else applied[0].resolved
        try:
            with torch.no_grad():
                result = world.together(lambda: localise(recorded, resolved, reference, world, case))
        except RanksDiverged:
            if case.checks[0].what != "runs":
                raise
            # The ranks already diverged in the training, so the training's result is reported.
    notes = (*result.notes, *(_RANK_QUERY.format(module) for module in world.rank_queries))
    return replace(result, notes=notes, seconds=time.perf_counter() - start)


def split(
    model: nn.Module, plan: PlanSource, options: TPOptions, world: World, reference: ReferenceRun
) -> tuple[nn.Module, list[AppliedPlan]]:
    """Split `model` in place over the ranks of `world`; with pipeline stages, split a copy of it for each stage.

    Returns:
        The model to train, and the applied plan of each stage (one if there are no stages).

    Raises:
        PlanError: the plan's checks refuse it.
        VerifyError: the plan changes code that the unsplit model runs, too.
    """
    with unpatched(model):
        mesh = world.mesh_of(options.degrees.cp)
        experts = None if options.degrees.ep == 1 else world.mesh_of.of_experts(options.degrees.ep)
        if options.degrees.pp > 1:
            return split_stages(model, plan, options, mesh, experts, reference.trace)
        return model, [apply_plan(model, mesh, plan=plan, experts=experts, **keywords(options))]


def _perturb_weights(model: nn.Module, rank: int) -> None:
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(rank + zlib.crc32(name.encode()))
        with torch.no_grad():
            param.add_(torch.randn(param.shape, generator=generator).to(param))


def _place(training: TrainingRun | None) -> str:
    return SPLITTING if training is None else training.place


def _remedy(training: TrainingRun | None, applied: Sequence[AppliedPlan]) -> str:
    """Return the remedy that the style of the module whose forward failed suggests; "" if there is none."""
    name = None if training is None else training.failed_module
    style = next((stage.styles[name] for stage in applied if name in stage.styles), None)
    return f"; {style.remedy}" if isinstance(style, Style) and style.remedy else ""


def _failed(options: TPOptions, scenario: Scenario, where: str, why: str) -> CaseResult:
    check = Check("runs", float("inf"), 0.0, where)
    return CaseResult(options, scenario, (check,), notes=(f"does not run, {where}: {why}",))
