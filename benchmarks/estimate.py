"""Compare the memory that `titanplans estimate` forecasts with published runs: the reserved memory of a rank.

python benchmarks/estimate.py

The runs are those of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md (commit b5bcd76) that are not compiled. It
states the memory as `max_reserved`, in GiB.
"""

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from titanplans.config import load_job
from titanplans.quiet import silence

HEAD = """| run | published | forecast | error | expandable segments | CPU seconds |
|---|--:|--:|--:|--:|--:|"""
JOB = """
[model]
name = "llama"
flavor = "{flavor}"
[training]
local_batch_size = {batch}
seq_len = 8192
[optimizer]
implementation = "foreach"
[loss]
fused = false
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


class Run(NamedTuple):
    """A published run."""

    title: str
    gpus: int
    published: float
    """Reserved memory in GiB."""
    flavor: str
    batch: int


RUNS = [
    Run("8B, FSDP 8, eager", 8, 82.4, "3.1-8B", 2),
    Run("8B, FSDP 128, eager", 128, 67.0, "3.1-8B", 2),
]


def main() -> None:
    from titanplans import kernels
    from titanplans.foresight.memory import forecast_memory

    kernels.install("cpu")
    print(HEAD)
    for run in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "job.toml")
            file.write_text(JOB.format(**run._asdict()))
            began = time.process_time()
            (forecast,) = forecast_memory(load_job([str(file)]), run.gpus)
        seconds = time.process_time() - began
        standard, expandable = (each.reserved / 2**30 for each in (forecast.standard, forecast.expandable))
        print(
            f"| {run.title} | {run.published:.1f} | {standard:.1f} | {standard / run.published - 1:+.1%} | "
            f"{expandable:.1f} | {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    silence()
    main()
