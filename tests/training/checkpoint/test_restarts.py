"""A job that loses ranks is restarted, by our launcher and by torchrun; if the launcher is killed, its ranks end."""

import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.jobs import Job, descendants, flip, have_ended
from titanplans.training.launch.launcher import _local_store
from titanplans.training.launch.main import main

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads processes from /proc"),
]


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def by_torchrun(backend, endpoint, arguments):
    """Train as `torchrun --nproc-per-node 2 --max-restarts 3` does, but with forked workers."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="job",
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs={"rank": 0, "timeout": 900} if backend == "static" else {},
        max_restarts=3,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, worker)(arguments[1:])


def free_endpoint():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def worker(arguments):
    sys.exit(main(arguments))


def repeats_itself(job):
    """Return whether steps that were repeated have the same loss, and no step is missing."""
    losses = dict(job.losses)
    return set(losses) == set(range(1, max(losses) + 1)) and len(set(job.losses)) == len(losses)


def kill(job, process, rank, restarts):
    """Kill a rank of a job that has been restarted `restarts` times; return the pid of the rank."""
    job.wait_for(process, lambda: job.out.count("Training starts at") == restarts + 1)
    job.wait_for_steps(process, 6)
    pid = descendants(process.pid)[rank]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_killed_ranks_are_restarted_up_to_max_restarts(job):
    process = job.start("--max-restarts", "1")
    pids = [kill(job, process, rank, restart) for restart, rank in enumerate((0, 1))]
    assert job.end(process) == 1
    first, *_, last = (line for line in job.err.splitlines() if line.startswith(("rank", "error")))
    assert first.startswith(f"rank 0 (pid {pids[0]}) was killed by SIGKILL")
    assert "0 restarts left" in first
    assert last.startswith(f"error: rank 1 (pid {pids[1]}) was killed by SIGKILL")
    assert repeats_itself(job)
    steps = job.steps[-1]
    assert job.run(f"--training.steps={steps + 2}", "--max-restarts=1") == 0
    assert job.steps[-1] == steps + 2
    # The last checkpoint has only weights, so every launcher treats the job as finished; but it can be trained for more
    # steps.
    for entry in (None, partial(by_torchrun, "static", free_endpoint())):
        restarts = () if entry else ("--max-restarts=1",)
        assert job.run(f"--training.steps={steps + 2}", *restarts, entry=entry) == 0
        assert job.out.count(f"step-{steps + 2} is complete: ") == 1
        assert job.losses == []
    assert job.run(f"--training.steps={steps + 4}", "--max-restarts=1") == 0
    assert "Training completed" in job.out
    assert "Sleeping" not in job.out
    assert job.steps[-1] == job.losses[-1][0] == steps + 4
    # A job is reported as finished only after its last checkpoint is checked.
    shard = job.folder / "out" / "checkpoint" / f"step-{steps + 4}" / "__1_0.distcp"
    flip(shard)
    assert job.run(f"--training.steps={steps + 4}") == 2
    assert f"the job is finished, but {shard.relative_to(job.folder)} is damaged" in job.err
    assert ", and the same command resumes from step-" in job.err


class Slow:
    def __del__(self):
        time.sleep(30 * int(os.environ["RANK"]))


def slow_to_free(arguments):
    """Train with an object that takes long to free, as data workers do. A rank that frees it must not be interrupted."""
    from titanplans.cli.main import run
    from titanplans.training.trainer.trainer import Trainer

    def train(self):
        slow = Slow()  # noqa: F841
        before(self)

    before, Trainer.train = Trainer.train, train
    run(arguments)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_that_would_repeat_is_not_restarted(job, ranks):
    options = (
        f"--parallelism.tensor_parallel_degree={ranks}",
        "--optimizer.lr=1e30",
        "--checkpoint.no-enable",
    )
    assert job.run(*options, "--lr_scheduler.warmup_steps=0", "--max-restarts=2", entry=slow_to_free) == 1
    assert job.err.startswith("error: step 2: the ")
    assert "is not finite" in job.err
    assert job.err.count("\n") == 1
    assert job.out.count("Training starts at") == 1


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_torchrun_restarts_ranks(job, backend):
    process = job.start(entry=partial(by_torchrun, backend, free_endpoint()))
    for restarts, rank in enumerate((0, 1)):
        kill(job, process, rank, restarts)
    job.wait_for(process, lambda: job.out.count("Training starts at") == 3)
    job.wait_for_steps(process, 3)
    assert repeats_itself(job)
    ranks = descendants(process.pid)
    process.kill()
    assert have_ended(ranks, 10)


@pytest.mark.parametrize("when", ["at once", "later"])
def test_processes_of_a_killed_launcher_end(job, when):
    process = job.start("--training.dataloader.num_workers=1", "--checkpoint.async_mode=async")
    job.wait_for(process, lambda: len(descendants(process.pid)) >= 2)
    if when == "later":
        job.wait_for_steps(process, 6)
        assert len(descendants(process.pid)) == 4  # two ranks, each with a worker
    processes = descendants(process.pid)
    process.kill()
    process.join()
    assert have_ended(processes, 5)
    assert not list(job.folder.glob("out/checkpoint/.*.removed"))


def test_the_store_listens_on_this_machine_only():
    store = _local_store()
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    assert [address for address in listening if address.endswith(f":{store.port:04X}")] == [
        f"0100007F:{store.port:04X}"
    ]
