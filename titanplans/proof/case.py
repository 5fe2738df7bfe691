"""One case of the grid: split the model, compare a step, and find where it fails. A step that raises fails the case."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from titanplans.errors import PlanError
from titanplans.proof import step
from titanplans.proof.compare import compare
from titanplans.proof.localise import localise
from titanplans.proof.record import Recorder, gradient_key
from titanplans.proof.reference import Reference
from titanplans.proof.report import CaseResult, Check, Localisation, case_name
from titanplans.proof.threads import Apart
from titanplans.proof.world import Run, World, agreed
from titanplans.tensor_parallel.apply import apply_plan
from titanplans.tensor_parallel.custom import PlanSource
from titanplans.tensor_parallel.plan import Plan, TPOptions

_SPLITTING = "while it is split"


def prove_cases(
    reference: Reference,
    plan: PlanSource,
    cases: Sequence[TPOptions],
    run: Run,
    *,
    find: bool,
    tell: Callable[[str], None],
) -> list[CaseResult]:
    """Prove `plan` with each of `cases`, which are of one degree.

    Args:
        reference: the whole model.
        plan: as in `apply_plan`.
        cases: the options.
        run: runs a function on every rank of a world that has as many as the degree.
        find: run cases that fail again to say where.
        tell: called with a few words before each step.

    Raises:
        PlanError: strict application refuses the plan, or the model can't be simulated.
    """

    def prove(world: World) -> list[CaseResult]:
        results = []
        for options in cases:
            if world.first:
                tell(case_name(options.degree, options.loss_parallel, options.sequence_parallel))
            start = time.perf_counter()
            result = agreed(world, _prove(reference, plan, options, world))
            results.append(replace(result, seconds=time.perf_counter() - start))
        return results

    results = run(prove)
    wrong = [i for i, r in enumerate(results) if not r.passed and r.checks[0].where != _SPLITTING]
    if wrong and find:
        reference.recorded()  # outside of the world: the whole model's tensors are not one per rank

        def search_all(world: World) -> list[Localisation]:
            found = []
            for i in wrong:
                if world.first:
                    tell(f"{results[i].name}: wrong, but where")
                model, styles = _split(reference.pristine, plan, cases[i], world)
                search = partial(localise, model, styles, reference, world, results[i])
                try:
                    found.append(world.together(search))
                except Apart:  # as in the step itself: what that said stands
                    found.append(results[i].localisation or Localisation())
            return found

        for i, localisation in zip(wrong, run(search_all), strict=True):
            results[i] = replace(results[i], localisation=localisation)
    return results


def _split(pristine: nn.Module, plan: PlanSource, options: TPOptions, world: World) -> tuple[nn.Module, Plan]:
    model = copy.deepcopy(pristine)
    applied = apply_plan(
        model,
        world.mesh,
        plan=plan,
        loss_parallel=options.loss_parallel,
        sequence_parallel=options.sequence_parallel,
        sequence_dim=options.sequence_dim,
    )
    world.settle(model)
    return model, applied.styles


def _prove(reference: Reference, plan: PlanSource, options: TPOptions, world: World) -> CaseResult:
    case = partial(CaseResult, options.degree, options.loss_parallel, options.sequence_parallel)

    def split() -> nn.Module:
        return _split(reference.pristine, plan, options, world)[0]

    try:
        return case(*world.together(lambda: compare(split(), reference, world)))
    except PlanError:
        raise
    except step.FAILURES as error:
        where = _failing_part(split, reference, world)
        found = Localisation((), (f"does not run, {where}: {step.first_line(error)}",))
        return case((Check("runs", float("inf"), 0.0, where),), localisation=found)


class _Failed(Exception):
    """A step that failed: its message says where."""


def _failing_part(split: Callable[[], nn.Module], reference: Reference, world: World) -> str:
    """Run a split model that failed once more, and return where it does, on the rank that failed."""

    def run() -> None:
        try:
            model = split()
        except step.FAILURES as error:
            raise _Failed(_SPLITTING) from error
        record = Recorder(model)
        try:
            with record:
                reference.run_step(model)
        except step.FAILURES as error:
            raise _Failed(_last(record)) from error

    try:
        world.together(run)
    except _Failed as failed:
        return str(failed)
    except step.FAILURES:
        return "where the ranks call different collectives"
    return "after the backward"


def _last(record: Recorder) -> str:
    """Return where a recorded step broke off."""
    if record.running:
        last = record.running[-1]
        inside = bool(record.order) and (not last or record.order[-1].startswith(f"{last}."))
        after = f" after {record.order[-1]}" if inside else ""
        return f"in {last or 'the model'}{after}"
    came_back = [key for key in record.order if gradient_key(key) in record.tensors]
    return f"in the backward of {came_back[0]}" if came_back else "in the loss"
