"""`estimating`: another process estimates a job on GPUs while the job starts, and the log compares the estimate with what is
measured.

The process runs `titanplans.foresight.background`.
"""

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from titanplans.config import JobConfig
from titanplans.torchrun import VARIABLES
from titanplans.training.launch.exit_status import REPORTS, describe_exit
from titanplans.training.trainer.device import DeviceMemory, Peak

CPU_SECONDS = 60
"""How much processor time the process may take. Wall time would depend on what else the machine does."""
COMPARED_STEP = 2
"""The step of a run after which memory is compared. Two steps are estimated: the first one creates the optimizer's states,
so only the second one has them in its forward and backward."""

_COMMAND = "titanplans estimate JOB.toml"
_OF_ANOTHER_PROCESS = {*VARIABLES, REPORTS, "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"}
"""Environment variables that make a process a rank of a job."""

logger = logging.getLogger(__name__)


class JobEstimate(NamedTuple):
    """The estimate of a job that the background process returns."""

    reserved: int
    """The bytes that torch's allocator reserves on rank 0 in two steps."""
    active: int
    """The peak of the bytes in the allocator's blocks that tensors use, on rank 0."""
    seconds: float
    """The time of a step."""
    warning: str
    """Why the fullest rank does not fit into its GPU's memory, or only just, and the remedy; "": it fits."""
    notes: list[str]
    """What is assumed or could not be estimated, in words."""


class BackgroundEstimate:
    """Estimates a job in another process, which ends with this one, and logs the result.

    Args:
        job: the job.
        world_size: the number of its ranks.
        device_name: the GPU's name in torch.
        memory: the GPU's memory in bytes.
        cpu_seconds: how much processor time the process may take.

    Raises:
        OSError: the process can't be started.
    """

    def __init__(
        self,
        job: JobConfig,
        world_size: int,
        device_name: str,
        memory: int,
        *,
        cpu_seconds: float = CPU_SECONDS,
    ):
        self.estimate: JobEstimate | None = None
        self._cpu_seconds, self._steps, self._has_time, self._is_read = cpu_seconds, 0, False, False
        self._comparisons: list[Callable[[JobEstimate], str]] = []
        """For each measurement that is not logged yet, a function that returns its line for the log, with the estimate."""
        self._process = subprocess.Popen(
            (sys.executable, "-m", "titanplans.foresight.background", str(os.getpid()), str(cpu_seconds)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is sent to all processes of a session's foreground group
        )
        request, answer = self._process.stdin, self._process.stdout
        assert request is not None
        assert answer is not None
        self._answer = answer
        with contextlib.suppress(BrokenPipeError), request:  # if it has ended, its exit status says why
            request.write(pickle.dumps((job, world_size, device_name, memory)))

    def after_step(self, step: int, memory: DeviceMemory, seconds: float | None) -> None:
        """Take measurements and log what is known. Called after each step of this run.

        Args:
            step: the step, counted from 1.
            memory: this rank's memory.
            seconds: the time of a step, as `MetricsProcessor.seconds_per_step`.
        """
        self._steps += 1
        if self._steps == COMPARED_STEP:
            self._comparisons.append(partial(memory_line, step, memory.peak()))
        if seconds is not None and not self._has_time:
            self._has_time = True
            self._comparisons.append(partial(time_line, step, seconds))
        self.log()

    def log(self) -> None:
        """If the process has ended, log its answer once, and each measurement next to its estimate."""
        if not self._is_read and self._process.poll() is not None:
            self._is_read = True
            self._read()
        if self.estimate is not None:
            for line in self._comparisons:
                logger.info(line(self.estimate))
            self._comparisons.clear()

    def _read(self) -> None:
        out, status = self._answer.read(), self._process.returncode
        if status == -signal.SIGPROF:
            reason = f"it takes more than {self._cpu_seconds:g} s of processor time; {_COMMAND} has no limit"
        elif status != 0:
            reason = f"its process {describe_exit(status)}; {_COMMAND} may say why"
        elif (refusal := (answer := json.loads(out)).get("refusal")) is not None:
            reason = refusal
        else:
            self.estimate = JobEstimate(**answer)
            if self.estimate.warning:
                logger.warning(f"estimate: {self.estimate.warning}")
            for note in self.estimate.notes:
                logger.info(f"estimate: {note}")
            return
        logger.info(f"no estimate (metrics.estimate): {reason}")

    def close(self) -> None:
        """Log what is known, and end the process if it still runs."""
        self.log()
        self._process.kill()
        self._process.wait()
        self._answer.close()
        self._is_read = True


@contextmanager
def estimating(job: JobConfig, device: torch.device) -> Iterator[BackgroundEstimate | None]:
    """Estimate `job` during the body; None: this rank or device has no estimate, or metrics.estimate is false."""
    if not job.metrics.estimate or device.type != "cuda" or os.environ["RANK"] != "0":
        yield None
        return
    memory = DeviceMemory(device)
    try:
        estimate = BackgroundEstimate(job, int(os.environ["WORLD_SIZE"]), memory.name, memory.total)
    except OSError as error:
        logger.info(f"no estimate (metrics.estimate): its process can't be started: {error}")
        yield None
        return
    try:
        yield estimate
    finally:
        estimate.close()


def memory_line(step: int, measured: Peak, estimate: JobEstimate) -> str:
    """Return a line with rank 0's measured and estimated memory."""
    return f"step {step}: " + "; ".join(
        f"{what} {size / 2**30:.2f} GiB, estimated {estimated / 2**30:.2f} ({estimated / size - 1:+.1%})"
        for what, size, estimated in (
            ("reserved", measured.reserved, estimate.reserved),
            ("active", measured.active, estimate.active),
        )
    )


def time_line(step: int, seconds: float, estimate: JobEstimate) -> str:
    """Return a line with the measured and the estimated time of a step."""
    return (
        f"step {step}: {seconds:.3g} s a step, estimated {estimate.seconds:.3g} "
        f"({estimate.seconds / seconds - 1:+.1%})"
    )


def _environment() -> dict[str, str]:
    """Return the environment of a process that is not a rank, sees no GPU, and finds the modules that this process finds."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_ANOTHER_PROCESS and not name.startswith("TORCHELASTIC_")
    }
    # ROCm has its own variable, which takes precedence.
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    # The folder of the program is in sys.path, and may have the user's modules.
    return environ | hidden | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
