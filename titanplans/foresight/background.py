"""The process in which a job is estimated while it starts. `titanplans.training.trainer.estimate` runs this module.

Its arguments are the id of the process that waits for it, and the seconds of processor time that it may take. It reads the
pickled arguments of `estimate` from stdin, and writes the values of a `JobEstimate`, or a refusal, to stdout as JSON.
"""

import json
import os
import pickle
import signal
import sys
from typing import TYPE_CHECKING

from titanplans.config import JobConfig
from titanplans.errors import UserError
from titanplans.foresight.allocator import has_expandable_segments
from titanplans.foresight.processes import forecast_in_process, start
from titanplans.quiet import silence
from titanplans.text import counted
from titanplans.training.launch.exit_status import exit_now
from titanplans.training.launch.orphans import end_with_parent

if TYPE_CHECKING:
    # Imported when this process is silent.
    from titanplans.foresight.forecast import Forecast
    from titanplans.training.trainer.estimate import JobEstimate


def main() -> None:
    """Estimate a job."""
    end_with_parent(int(sys.argv[1]))
    os.nice(19)
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))  # after this time SIGPROF ends the process
    request = sys.stdin.buffer.read()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # libraries and the user's modules may print
        silence(training=True)
        try:
            answer = estimate(*pickle.loads(request))._asdict()
        except UserError as error:
            answer = {"refusal": str(error)}
        json.dump(answer, out)
    exit_now(0)


def estimate(job: JobConfig, world_size: int, device_name: str, memory: int) -> "JobEstimate":
    """Return the estimate of `job`, on GPUs with this name in torch and this memory in bytes.

    Raises:
        UserError: the GPU is unknown, or as `forecast`.
    """
    from titanplans.foresight.hardware import gpu_of_device
    from titanplans.training.trainer.estimate import JobEstimate

    gpu = gpu_of_device(device_name, memory)
    start(gpu.processors, gpu.shared_memory)
    forecast = forecast_in_process(job, world_size, gpu)
    expandable = has_expandable_segments()
    rank = forecast.ranks[0].memory
    allocator = rank.expandable if expandable else rank.standard
    return JobEstimate(
        reserved=allocator.reserved,
        active=allocator.allocated,
        seconds=forecast.seconds,
        warning=warning_of(forecast, expandable=expandable),
        notes=forecast.notes,
    )


def warning_of(forecast: "Forecast", *, expandable: bool) -> str:
    """Return why the fullest rank does not fit into the memory of its GPU, or fits only just; "" if it fits."""
    gpu, retries = forecast.gpu, forecast.retries(expandable)
    if retries == 0:
        return ""
    reserved = {
        rank.stage: (rank.memory.expandable if expandable else rank.memory.standard).reserved
        for rank in forecast.ranks
    }
    stage = max(reserved, key=lambda stage: reserved[stage])
    where = f" on a rank of pipeline stage {stage}" if len(reserved) > 1 else ""
    consequence = (
        "so the job is expected to run out of memory"
        if retries is None
        else f"so torch returns unused memory to the GPU {counted(retries, 'time')} in two steps, which is slow"
    )
    return (
        f"the job reserves {reserved[stage] / 2**30:.2f} GiB{where}, of {gpu.memory_gib:.1f} - {gpu.outside_gib:.1f} for "
        f"CUDA and NCCL, {consequence}. titanplans fit JOB.toml --gpus {forecast.gpus}x{gpu.name} finds layouts that fit"
    )


if __name__ == "__main__":
    main()
