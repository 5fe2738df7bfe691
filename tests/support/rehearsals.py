"""Rehearsals of tiny jobs."""

from pathlib import Path

from transformers import PretrainedConfig

from titanplans import kernels
from titanplans.config import JobConfig, load_job
from titanplans.foresight.forecast import Forecast, forecast_of
from titanplans.foresight.hardware import find_gpu
from titanplans.foresight.memory import MemoryForecast

_TOML = """
[training]
local_batch_size = 2
seq_len = 32
[activation_checkpoint]
mode = "none"
"""


def job(folder: Path, *options: str) -> JobConfig:
    """Return a tiny job with these options, such as "parallelism.tensor_parallel_degree=2"."""
    file = folder / "job.toml"
    file.write_text(_TOML)
    return load_job([str(file), *(f"--{option}" for option in options)])


def forecasts(
    job: JobConfig, config: PretrainedConfig, ranks: int, *, every_block: bool = False
) -> list[MemoryForecast]:
    """Return the memory of the first rank of the first, a middle and the last pipeline stage.

    `every_block`: rehearse every block, instead of repeating the events of one of several equal blocks.
    """
    return [rank.memory for rank in forecast(job, config, ranks, every_block=every_block).ranks]


def forecast(job: JobConfig, config: PretrainedConfig, ranks: int, *, every_block: bool = False) -> Forecast:
    """Return the forecast of a job on GPUs of titanplans; `every_block` as in `forecasts`."""
    install()
    return forecast_of(job, config, ranks, find_gpu("H100"), every_block=every_block)


def install() -> None:
    """Replace the kernels that a CPU lacks."""
    kernels.install("cpu")
