"""`forecast_apart`: forecasts in a process of their own.

A rehearsal starts a fake process group and replaces kernels. Some models even end the process: a kernel's host code may read
the address of a tensor without memory.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from titanplans.config import JobConfig
from titanplans.errors import ParallelError
from titanplans.foresight.hardware import Gpu
from titanplans.foresight.memory import MemoryForecast
from titanplans.quiet import silence


def forecast_apart(job: JobConfig, world_size: int, gpu: Gpu) -> tuple[list[MemoryForecast], list[str]]:
    """Return the results of `forecast_memory` and of `assumptions` for `job` on `gpu`, computed in a new process.

    Raises:
        ParallelError: the process ended without a result.
        UserError: as `forecast_memory`.
    """
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), partial(silence, training=True)
    ) as pool:
        try:
            return pool.submit(_forecast, job, world_size, gpu).result()
        except BrokenProcessPool as error:
            raise ParallelError(
                f"{job.model.name or 'this model'} can't be estimated: its step on tensors without memory ended the "
                "process, so one of its kernels reads values"
            ) from error


def _forecast(job: JobConfig, world_size: int, gpu: Gpu) -> tuple[list[MemoryForecast], list[str]]:
    from titanplans.foresight.memory import assumptions, forecast_memory
    from titanplans.kernels import without_launches
    from titanplans.training.job.checks import import_custom
    from titanplans.training.trainer.device import prepare_device

    prepare_device()
    without_launches.start(processors=gpu.processors, shared_memory=gpu.shared_memory)
    import_custom(job)
    return forecast_memory(job, world_size, gpu.usable), assumptions(job)
