"""One case of the grid: split, compare, and if that fails say where; a model that breaks is a verdict too."""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from torch import nn

from titanplans.errors import PlanError
from titanplans.proof import step
from titanplans.proof.compare import compare
from titanplans.proof.localise import localise
from titanplans.proof.record import Recorder, gradient_key
from titanplans.proof.reference import Reference
from titanplans.proof.report import CaseResult, Check, Localisation
from titanplans.proof.world import World
from titanplans.tensor_parallel.apply import apply_plan
from titanplans.tensor_parallel.custom import PlanSource
from titanplans.tensor_parallel.plan import Plan, TPOptions

_SPLITTING = "while it is split"


def prove_cases(
    reference: Reference,
    plan: PlanSource,
    cases: Sequence[TPOptions],
    start_world: Callable[[], AbstractContextManager[World]],
    *,
    find: bool,
    tell: Callable[[str], None],
) -> list[CaseResult]:
    """Prove `plan` with each of `cases`, which are of one degree.

    Args:
        reference: the whole model.
        plan: as in `apply_plan`.
        cases: the options.
        start_world: a context with as many ranks as the degree.
        find: run cases that fail again to say where.
        tell: called with a few words before each step.

    Raises:
        PlanError: strict application refuses the plan, or the model can't be simulated.
    """
    results = []
    with start_world() as world:
        for options in cases:
            tell(words(options))
            start = time.perf_counter()
            result = world.agreed(
                _prove(partial(_split, reference.pristine, plan, options, world), reference, options, world)
            )
            results.append(replace(result, seconds=time.perf_counter() - start))
    wrong = [i for i, r in enumerate(results) if not r.passed and r.checks[0].where != _SPLITTING]
    if wrong and find:
        reference.recorded()  # outside the world: the whole model's tensors are not one per rank
        with start_world() as world:
            for i in wrong:
                tell(f"{words(cases[i])}: wrong, but where")
                model, styles = _split(reference.pristine, plan, cases[i], world)
                found = localise(model, styles, reference, world, results[i])
                results[i] = replace(results[i], localisation=world.agreed(found))
    return results


def words(options: TPOptions) -> str:
    """Return the options of a case in words."""
    loss, sequence = ("on" if on else "off" for on in (options.loss_parallel, options.sequence_parallel))
    return f"tp = {options.degree}, loss parallel {loss}, sequence parallel {sequence}"


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


def _prove(
    split: Callable[[], tuple[nn.Module, Plan]], reference: Reference, options: TPOptions, world: World
) -> CaseResult:
    case = partial(CaseResult, options.degree, options.loss_parallel, options.sequence_parallel)
    try:
        return case(*compare(split()[0], reference, world))
    except PlanError:
        raise
    except step.FAILURES as error:
        _refuse_unsimulated(error, reference.pristine)
        where = _failing_part(split, reference)
        found = Localisation((), (f"does not run, {where}: {step.first_line(error)}",))
        return case((Check("runs", float("inf"), 0.0, where),), localisation=found)


def _failing_part(split: Callable[[], tuple[nn.Module, Plan]], reference: Reference) -> str:
    """Run a split model that failed once more, and return where it does."""
    record = None
    try:
        record = Recorder(split()[0])
        with record:
            step.backward(step.forward(record.model, reference.inputs), reference.labels)
    except step.FAILURES:
        pass
    else:
        return "after the backward"
    if record is None:
        return _SPLITTING
    if record.running:
        last = record.running[-1]
        inside = bool(record.order) and (not last or record.order[-1].startswith(f"{last}."))
        after = f" after {record.order[-1]}" if inside else ""
        return f"in {last or 'the model'}{after}"
    came_back = [key for key in record.order if gradient_key(key) in record.tensors]
    return f"in the backward of {came_back[0]}" if came_back else "in the loss"


def _refuse_unsimulated(error: Exception, model: nn.Module) -> None:
    if "data pointer" in str(error):
        raise PlanError(
            f"{type(model).__name__} runs a kernel that reads memory addresses, which simulated ranks have not: prove it "
            "under torchrun, one process a rank (process_group=True, or --process-group)"
        ) from error
