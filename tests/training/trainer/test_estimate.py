"""The estimate of a job in the background: its process and the lines of the log."""

import logging
import os
import re
import signal
import sys
import time

import pytest
import torch

from tests.support import rehearsals
from tests.support.jobs import have_ended
from tests.support.programs import run_python
from titanplans import modeling
from titanplans.foresight.background import warning_of
from titanplans.foresight.forecast import assumptions, forecast_of
from titanplans.foresight.hardware import gpu_of_device
from titanplans.training.trainer.device import DeviceMemory, Peak
from titanplans.training.trainer.estimate import (
    BackgroundEstimate,
    JobEstimate,
    estimating,
    memory_line,
    time_line,
)

H100, GIB = "NVIDIA H100 80GB HBM3", 2**30


class Memory(DeviceMemory):
    """The memory of a GPU on which a job uses half of what it reserves."""

    def __init__(self):
        pass

    def peak(self):
        return Peak(2 * GIB, GIB)


def wait_for(process, caplog):
    """Wait until the process has ended; return what the log says about it."""
    deadline = time.monotonic() + 120
    while process._process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    caplog.clear()
    process.log()
    return caplog.messages


@pytest.fixture
def start(tmp_path, caplog):
    """Return a function that starts the estimate of a tiny job on two GPUs."""
    caplog.set_level(logging.INFO)
    processes = []

    def start(*options, device_name=H100, memory=80 * GIB, **limits):
        job = rehearsals.job(tmp_path, *(options or ["model.name=qwen3"]))
        processes.append(BackgroundEstimate(job, 2, device_name, memory, **limits))
        return job, processes[-1]

    yield start
    for process in processes:
        process.close()


def test_the_log_compares_measurements_with_the_estimate(start, caplog, monkeypatch):
    # The process is no rank of the job that starts it.
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    memory = 2 * GIB + 2**20  # 1 MiB more than what is left to CUDA and NCCL, which is too little
    job, process = start(memory=memory)
    process.after_step(1, Memory(), None)
    logged, levels = wait_for(process, caplog), [record.levelname for record in caplog.records]

    gpu = gpu_of_device(H100, memory)
    forecast = forecast_of(job, modeling.load_config("qwen3", "debug"), 2, gpu)
    allocator, warning = forecast.ranks[0].memory.standard, warning_of(forecast, expandable=False)
    notes = [*assumptions(job), *forecast.notes]
    estimate = JobEstimate(allocator.reserved, allocator.allocated, forecast.seconds, warning, notes)
    assert process.estimate == estimate
    assert logged == [f"estimate: {line}" for line in (warning, *notes)]
    assert levels == ["WARNING", *["INFO"] * len(notes)]
    assert re.fullmatch(
        r"the job reserves 0\.\d+ GiB, of 2\.0 - 2\.0 for CUDA and NCCL, so the job is expected to run out of memory\. "
        r"titanplans fit JOB\.toml --gpus 2xH100 finds layouts that fit",
        warning,
    )

    caplog.clear()
    process.after_step(2, Memory(), None)
    process.after_step(3, Memory(), None)
    process.after_step(4, Memory(), 0.5)
    process.after_step(5, Memory(), 0.7)
    assert caplog.messages == [memory_line(2, Memory().peak(), estimate), time_line(4, 0.5, estimate)]


def test_what_is_measured_before_the_estimate_is_there_is_compared_later(start, caplog):
    _, process = start()
    process.after_step(1, Memory(), None)
    process.after_step(2, Memory(), None)
    process.after_step(10, Memory(), 0.5)
    assert caplog.messages == []
    process.estimate = JobEstimate(GIB, GIB, 1.0, warning="", notes=[])
    process.log()
    assert caplog.messages == [
        "step 2: reserved 2.00 GiB, estimated 1.00 (-50.0%); active 1.00 GiB, estimated 1.00 (+0.0%)",
        "step 10: 0.5 s a step, estimated 1 (+100.0%)",
    ]


@pytest.mark.parametrize(
    ("options", "arguments", "reason"),
    [
        ([], {"device_name": "NVIDIA L40S"}, '"NVIDIA L40S": no GPU of titanplans'),
        pytest.param(
            ["model.name=qwen3", "training.enable_cpu_offload=true"],
            {},
            "can't be estimated",
            marks=pytest.mark.thorough,
        ),
        (
            [],
            {"cpu_seconds": 0.5},
            "it takes more than 0.5 s of processor time; titanplans estimate JOB.toml has no limit",
        ),
    ],
)
def test_why_there_is_no_estimate(start, caplog, options, arguments, reason):
    _, process = start(*options, **arguments)
    process.after_step(1, Memory(), None)
    process.after_step(2, Memory(), None)
    (line,) = wait_for(process, caplog)
    assert line.startswith("no estimate (metrics.estimate): ")
    assert reason in line
    assert caplog.records[-1].levelname == "INFO"


def test_a_process_that_is_killed(start, caplog):
    _, process = start()
    os.kill(process._process.pid, signal.SIGKILL)
    (line,) = wait_for(process, caplog)
    assert "its process was killed by SIGKILL" in line


def test_the_process_ends_with_the_body(start):
    _, process = start()
    process.close()
    process.log()
    assert have_ended([process._process.pid], 0)


STARTS = """
import os, sys
from titanplans.config import load_job
from titanplans.training.trainer.estimate import BackgroundEstimate
process = BackgroundEstimate(load_job(sys.argv[1:]), 2, "NVIDIA H200", 2**37)
print(process._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends it")
def test_the_process_ends_with_a_rank_that_is_killed(tmp_path):
    rehearsals.job(tmp_path)
    result = run_python("-c", STARTS, "job.toml", "--model.name=qwen3", cwd=tmp_path)
    assert have_ended([int(result.stdout)], 10), result.stderr


def test_a_cpu_has_no_estimate(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with estimating(rehearsals.job(tmp_path), torch.device("cpu")) as process:
        assert process is None
