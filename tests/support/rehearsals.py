"""Rehearsals of tiny jobs."""

from pathlib import Path

from transformers import PretrainedConfig

from titanplans import kernels
from titanplans.config import JobConfig, load_job
from titanplans.foresight.memory import MemoryForecast, forecast_of, shortened
from titanplans.foresight.pipeline import Crossing
from titanplans.foresight.rehearsal import rehearse

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
    """Return the forecast of the first rank of each pipeline stage.

    `every_block`: rehearse all blocks, and let none stand for others.
    """
    kernels.install("cpu")
    stages, crossing = job.parallelism.pipeline_parallel_degree, Crossing()
    short_job, depth = shortened(job, config, every_block=every_block)
    return [
        forecast_of(
            rehearse(short_job, config, ranks, stage * ranks // stages, depth.removed, crossing), depth, stage
        )
        for stage in range(stages)
    ]
