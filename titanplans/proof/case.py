"""One case: the split model takes the step that the whole one took, is compared with it, and is searched where it fails.

A step that raises fails the case.
"""

import time
from dataclasses import replace

import torch

from titanplans.errors import PlanError
from titanplans.proof import step
from titanplans.proof.compare import compare
from titanplans.proof.localise import localise
from titanplans.proof.reference import Reference
from titanplans.proof.report import CaseResult, Check
from titanplans.proof.split import SPLITTING, SplitStep
from titanplans.proof.threads import Apart
from titanplans.proof.world import World, from_first
from titanplans.tensor_parallel.custom import PlanSource
from titanplans.tensor_parallel.plan import TPOptions


class _Broken(Exception):
    """A step that raised: where, and what."""


def prove_case(reference: Reference, plan: PlanSource, options: TPOptions, world: World) -> CaseResult:
    """Prove `plan` with `options`. Every rank of `world` calls this, and every rank gets the first one's result.

    Raises:
        PlanError: strict application refuses the plan, or the model can't be simulated.
    """
    start = time.perf_counter()
    split = SplitStep(reference)

    def take() -> CaseResult:
        try:
            split.split(plan, options, world)
            split.run()
            return compare(split, options, reference, world)
        except PlanError:
            raise
        except step.FAILURES as error:
            raise _Broken(split.place, step.first_line(error)) from error

    try:
        result = world.together(take)
    except _Broken as broken:
        result = _failed(options, *broken.args)
    except Apart as apart:
        result = _failed(options, split.place, step.first_line(apart))
    result = from_first(world, result)
    if not result.passed and result.checks[0].where != SPLITTING:
        try:
            with torch.no_grad():
                result = world.together(lambda: localise(split, reference, world, result))
        except Apart:
            pass  # as in the step itself: what that said stands
    return replace(result, ranks=world.name, seconds=time.perf_counter() - start)


def _failed(options: TPOptions, where: str, why: str) -> CaseResult:
    check = Check("runs", float("inf"), 0.0, where)
    return CaseResult(options, (check,), notes=(f"does not run, {where}: {why}",))
