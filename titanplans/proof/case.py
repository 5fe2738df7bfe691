"""One case: the split model goes through the whole one's training, and is compared with it.

A training that raises fails the case.
"""

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

_ASKED = (
    "{} asks torch.distributed.get_rank(): a rank's number in the world, which with data parallelism differs from its "
    "number in the mesh, mesh.get_local_rank()"
)


class _Broken(Exception):
    """A training that raised: the place, and the error."""


def prove_case(
    reference: ReferenceRun, plan: PlanSource, options: TPOptions, scenario: Scenario, world: World
) -> CaseResult:
    """Prove `plan` with `options`. Every rank of `world` calls this, and gets the first one's result.

    If the `reference` was recorded, a failing case is searched for the module at which it goes wrong first.

    Raises:
        PlanError: strict application refuses the plan.
    """
    start = time.perf_counter()
    applied: list[AppliedPlan] = []
    training: TrainingRun | None = None
    comparison = Comparison(reference, world)

    def take() -> CaseResult:
        nonlocal applied, training
        try:
            model = copy.deepcopy(reference.pristine)
            if scenario.differing and not world.first:
                _change(model, world.mesh.get_local_rank())
            model, applied = split(model, plan, options, world, reference)
            if scenario.recomputed:
                for one in applied:
                    recompute(one.decoder)
            training = reference.training(model, fused=scenario.fused)
            comparison.run(training)
        except (PlanError, VerifyError):
            raise
        except FAILURES as error:
            raise _Broken(_place(training), first_line(error) + _remedy(training, applied)) from error
        return comparison.result(options, scenario)

    try:
        result = world.together(take)
    except _Broken as broken:
        result = _failed(options, scenario, *broken.args)
    except RanksDiverged as apart:
        result = _failed(options, scenario, _place(training), first_line(apart))
    result = from_first(world, result)
    if not result.passed and reference.recording and training is not None:
        so_far, case = training, result
        resolved = so_far.model.plan if isinstance(so_far.model, PipelinedModel) else applied[0].resolved
        try:
            with torch.no_grad():
                result = world.together(lambda: localise(so_far, resolved, reference, world, case))
        except RanksDiverged:
            if case.checks[0].what != "runs":
                raise
            # The ranks lost each other in the training itself, whose result stands.
    notes = (*result.notes, *(_ASKED.format(who) for who in world.asked))
    return replace(result, notes=notes, seconds=time.perf_counter() - start)


def split(
    model: nn.Module, plan: PlanSource, options: TPOptions, world: World, reference: ReferenceRun
) -> tuple[nn.Module, list[AppliedPlan]]:
    """Split `model` in place over the ranks of `world`, or its stages, copies of it.

    Returns:
        What trains, and the plan as it was applied, for each stage.

    Raises:
        PlanError: strict application refuses the plan.
        VerifyError: it changes code that the whole model runs, too.
    """
    with unpatched(model):
        mesh = world.mesh_of(options.degrees.cp)
        experts = None if options.degrees.ep == 1 else world.mesh_of.of_experts(options.degrees.ep)
        if options.degrees.pp > 1:
            return split_stages(model, plan, options, mesh, experts, reference.trace)
        return model, [apply_plan(model, mesh, plan=plan, experts=experts, **keywords(options))]


def _change(model: nn.Module, rank: int) -> None:
    """Give the parameters of this rank other values."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(rank + zlib.crc32(name.encode()))
        with torch.no_grad():
            param.add_(torch.randn(param.shape, generator=generator).to(param))


def _place(training: TrainingRun | None) -> str:
    return SPLITTING if training is None else training.place


def _remedy(training: TrainingRun | None, applied: Sequence[AppliedPlan]) -> str:
    """Return the remedy of the style of the module whose forward broke off; "" if there is none."""
    where = None if training is None else training.broke_in
    style = next((one.styles[where] for one in applied if where in one.styles), None)
    return f"; {style.remedy}" if isinstance(style, Style) and style.remedy else ""


def _failed(options: TPOptions, scenario: Scenario, where: str, why: str) -> CaseResult:
    check = Check("runs", float("inf"), 0.0, where)
    return CaseResult(options, scenario, (check,), notes=(f"does not run, {where}: {why}",))
