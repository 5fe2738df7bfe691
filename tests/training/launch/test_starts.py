"""Every way to start a job, as a user types it, gives the same losses and the same exit statuses."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import LOSS, PATIENCE, Job
from tests.support.paths import ROOT

pytestmark = pytest.mark.thorough

BIN = Path(sys.executable).parent
TRAIN = str(ROOT / "train.py")
STEPS = ("--training.steps=3", "--checkpoint.no-last_save_model_only")

# Scripts `srun` and `scontrol` of a cluster whose machines are all this one.
SRUN = r"""#!/bin/bash
shift  # --kill-on-bad-exit=1
for node in $(seq "$SLURM_NNODES"); do "$@" & done
wait -n && wait -n || { kill $(jobs -p); wait; exit 1; }
"""
SCONTROL = r"""#!/bin/bash
printf '127.0.0.1\n127.0.0.1\n'
"""


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Started:
    """Processes of one job, one command for each machine."""

    def __init__(self, job: Job, *commands: list[str], **variables: str):
        self.log = job.folder / "output"
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment |= {
            "PATH": f"{job.folder}:{BIN}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            **variables,
        }
        with self.log.open("w") as output:
            self.processes = [
                subprocess.Popen(
                    command, cwd=job.folder, env=environment, stdout=output, stderr=subprocess.STDOUT
                )
                for command in commands
            ]

    @property
    def output(self) -> str:
        return self.log.read_text()

    def end(self) -> list[int]:
        """Wait for the end of all processes; return their exit statuses."""
        return [process.wait(PATIENCE) for process in self.processes]

    def wait_for_steps(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while len(LOSS.findall(self.output)) < step:
            assert time.monotonic() < deadline, self.output
            assert all(process.poll() is None for process in self.processes), self.output
            time.sleep(0.05)


def torchrun(*options: str, script: str = TRAIN) -> list[str]:
    return ["torchrun", *options, script, "job.toml"]


def slurm(job: Job) -> dict[str, str]:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (job.folder / name).write_text(text)
        (job.folder / name).chmod(0o755)
    # the job is submitted from a clone of the repository
    (job.folder / "train.py").write_text((ROOT / "train.py").read_text())
    variables = {"SLURM_JOB_NODELIST": "machine[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    return variables | {"GPUS_PER_NODE": "1", "PORT": str(free_port()), "RESTARTS": "0"}


def started_by(job: Job, way: str, options: tuple[str, ...]) -> Started:
    if way == "titanplans train":
        return Started(job, ["titanplans", "train", "job.toml", *options])
    if way == "train.py":
        return Started(job, [sys.executable, TRAIN, "job.toml", *options])
    if way == "torchrun":
        return Started(job, [*torchrun("--standalone", "--nproc-per-node", "2"), *options])
    if way == "torchrun -m":
        arguments = [
            "torchrun",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "titanplans",
            "train",
            "job.toml",
        ]
        return Started(job, [*arguments, *options])
    if way == "two machines":
        where = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
        each = ("--nnodes", "2", "--nproc-per-node", "1", *where)
        return Started(job, *([*torchrun(*each, "--node-rank", rank), *options] for rank in "01"))
    return Started(job, [str(ROOT / "configs/slurm.sh"), "job.toml", *options], **slurm(job))


@pytest.fixture
def start(job):
    """Return a function that starts the job; processes that still run after a failed test are killed."""
    starts = []

    def start(way: str, *options: str) -> Started:
        starts.append(started_by(job, way, options))
        return starts[-1]

    yield start
    for started in starts:
        for process in started.processes:
            process.kill()  # its ranks end with it


WAYS = ["titanplans train", "train.py", "torchrun", "torchrun -m", "two machines", "SLURM"]


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """A dict that the tests fill with the losses of each way to start."""
    return {}


@pytest.mark.parametrize("way", WAYS)
def test_a_job_has_the_same_losses_however_it_is_started(job, start, losses, way):
    started = start(way, *STEPS)
    assert set(started.end()) == {0}, started.output
    losses[way] = LOSS.findall(started.output)
    assert [int(step) for step, _ in losses[way]] == [1, 2, 3]
    assert losses[way] == next(iter(losses.values()))
    assert job.steps == [3]


@pytest.mark.parametrize("way", ["torchrun", "SLURM"])
def test_a_refused_job_prints_one_line_of_rank_0(start, way):
    started = start(way, "--parallelism.tensor_parallel_degree=3")
    assert 0 not in started.end()
    lines = [line for line in started.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, started.output
    assert "tensor_parallel_degree = 3" in lines[0]


@pytest.mark.parametrize("way", ["torchrun", "two machines"])
def test_sigterm_to_torchrun_saves_a_checkpoint_and_the_same_command_resumes(job, start, way):
    options = ("--checkpoint.save_on_signal", "--checkpoint.interval=100000")
    started = start(way, *options)
    started.wait_for_steps(3)
    for process in started.processes:
        process.send_signal(signal.SIGTERM)
    started.end()
    (ended,) = set(re.findall(r"SIGTERM: the job ends after step (\d+), which is saved", started.output))
    assert job.steps == [int(ended)]
    again = start(way, *options, f"--training.steps={int(ended) + 1}")
    assert set(again.end()) == {0}, again.output
    assert [int(step) for step, _ in LOSS.findall(again.output)] == [int(ended) + 1]
