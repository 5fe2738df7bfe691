"""`rehearsing`: processes in which jobs are forecast.

A rehearsal starts a fake process group and replaces kernels. Some models even end the process: a kernel's host code may read
the address of a tensor without memory.
"""

import copy
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import forkserver
from typing import TYPE_CHECKING

from titanplans.config import JobConfig, strategy_of
from titanplans.errors import ParallelError, UserError
from titanplans.quiet import silence

if TYPE_CHECKING:
    # A new process imports this module before it is silent.
    from titanplans.foresight.explanation import Explanation
    from titanplans.foresight.forecast import Forecast
    from titanplans.foresight.hardware import Gpu
    from titanplans.foresight.predict import LayoutSample
    from titanplans.plan.degrees import Degrees


def prepare() -> None:
    """Start the server from which `rehearsing` forks its processes, so that it imports while the caller does other things.

    The imports take longer than most rehearsals.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["titanplans.foresight.preloaded"])
    forkserver.ensure_running()


@contextmanager
def rehearsing(gpu: "Gpu", processes: int = 1) -> Iterator[ProcessPoolExecutor]:
    """Return new processes for the functions of this module. FLA's kernels run in them as on `gpu`, but without launches.

    Raises:
        ParallelError: a process ended without a result.
    """
    prepare()
    initializer = partial(start, gpu.processors, gpu.shared_memory)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("forkserver"), initializer) as pool:
        try:
            yield pool
        except BrokenProcessPool as error:
            raise ParallelError(
                "this model can't be estimated: its step on tensors without memory ended the process, so one of its kernels "
                "reads values"
            ) from error


def start(processors: int, shared_memory: int) -> None:
    """Make this process one in which jobs are forecast, and nothing else is done."""
    silence(training=True)
    from titanplans.kernels import without_launches
    from titanplans.training.trainer.device import prepare_device

    prepare_device()
    without_launches.start(processors=processors, shared_memory=shared_memory)


def forecast_in_process(job: JobConfig, world_size: int, gpu: "Gpu") -> "Forecast":
    """Return the result of `forecast`, whose notes begin with the job's `assumptions`.

    Raises:
        UserError: as `forecast`.
    """
    from titanplans.foresight.forecast import assumptions, forecast
    from titanplans.training.job.checks import import_custom

    import_custom(job)
    result = forecast(job, world_size, gpu)
    result.notes = [*assumptions(job), *result.notes]
    return result


def sample_in_process(job: JobConfig, world_size: int, gpu: "Gpu") -> "LayoutSample":
    """Return the result of `sample`.

    Raises:
        UserError: as `sample`.
    """
    from titanplans.foresight.forecast import sample
    from titanplans.training.job.checks import import_custom

    import_custom(job)
    return sample(job, world_size, gpu)


def explain_in_process(job: JobConfig, world_size: int, gpu: "Gpu") -> "tuple[Explanation, list[str]]":
    """Return the results of `explain` and of `assumptions`.

    Raises:
        UserError: as `explain`.
    """
    from titanplans.foresight.explanation import explain
    from titanplans.foresight.forecast import assumptions
    from titanplans.training.job.checks import import_custom

    import_custom(job)
    explanation = explain(job, world_size, gpu)
    return explanation, [*assumptions(job), *explanation.forecast.notes]


def refusals_in_process(job: JobConfig, degrees: "Sequence[Degrees]") -> list[str | None]:
    """Return for each of `degrees` why the job's plan refuses it, without a pipeline; None: it accepts it."""
    from titanplans import modeling
    from titanplans.foresight.forecast import shortened
    from titanplans.foresight.rehearsal import remove_blocks
    from titanplans.parallel.parallelize import dry_run
    from titanplans.plan.degrees import Degrees
    from titanplans.training.job import resolve
    from titanplans.training.job.checks import import_custom

    import_custom(job)
    config = resolve.hf_config(job)
    _, depth = shortened(job, config)
    model = modeling.build(config)
    remove_blocks(model, depth.removed)

    @cache
    def refusal(tp: int, cp: int, ep: int) -> str | None:
        try:
            dry_run(copy.deepcopy(model), strategy_of(job), Degrees(tp=tp, cp=cp, ep=ep), "cpu")
        except UserError as error:
            return str(error)
        return None

    return [refusal(each.tp, each.cp, each.ep) for each in degrees]


def stages_in_process(job: JobConfig, counts: Sequence[int]) -> list[tuple[int, ...] | str]:
    """Return for each degree of pipeline parallelism the first block of each stage, or why the model has no such stages."""
    from titanplans import modeling
    from titanplans.training.job import resolve
    from titanplans.training.job.checks import import_custom
    from titanplans.training.pipeline.stage import starts_of_stages

    import_custom(job)
    model = modeling.build(resolve.hf_config(job))

    def starts(count: int) -> tuple[int, ...] | str:
        try:
            return starts_of_stages(model, job.parallelism, count, job.training.seq_len)
        except UserError as error:
            return str(error)

    return [starts(count) for count in counts]
