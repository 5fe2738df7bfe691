"""The process group: its environment variables, what it sets and restores, and that it ends with its body."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.paths import ROOT
from titanplans.errors import ParallelError
from titanplans.parallel.mesh.process_group import (
    _sigint_deferred,
    _thread_count,
    available_cores,
    backend_for,
    process_group,
)

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (*VARIABLES, "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_a_single_process():
    before = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    with process_group("cpu", threads=3, timeout=timedelta(seconds=77)) as process:
        assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (
            0,
            1,
            0,
            1,
        )
        assert process.device == torch.device("cpu")
        assert torch.get_num_threads() == 3
        assert dist.get_backend() == "gloo"
        options = dist.group.WORLD._get_backend(process.device).options
        assert options._timeout == timedelta(seconds=77)
        dist.all_reduce(torch.ones(1))
        with (
            pytest.raises(ParallelError, match=r"already initialized \(gloo, 1 ranks\)"),
            process_group("cpu"),
        ):
            pass
        assert dist.is_initialized()
    assert not dist.is_initialized()
    assert before == (torch.get_num_threads(), signal.getsignal(signal.SIGINT))


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_the_group_ends_with_its_body_and_can_start_again(error):
    before = torch.get_num_threads(), signal.getsignal(signal.SIGINT)

    def body():
        with process_group("cpu", threads=2):
            dist.new_group([0])
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error

    with pytest.raises(error):
        body()
    assert not dist.is_initialized()
    assert before == (torch.get_num_threads(), signal.getsignal(signal.SIGINT))
    with process_group("cpu"):
        dist.all_reduce(torch.ones(1))


def test_a_body_may_destroy_the_group():
    with process_group("cpu"):
        dist.destroy_process_group()


@pytest.fixture
def interruptible():
    """Restore the handler of SIGINT, which shells ignore in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_during_the_tear_down_is_raised_after_it():
    before, done = signal.getsignal(signal.SIGINT), []

    def tear_down():
        with _sigint_deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("tear-down")

    with pytest.raises(KeyboardInterrupt):
        tear_down()
    assert done
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK, WORLD_SIZE set, but not LOCAL_RANK, "),
        ({"MASTER_ADDR": "localhost"}, "unset MASTER_ADDR for a single process"),
        (dict.fromkeys(VARIABLES, "1") | {"RANK": "one"}, "RANK = 'one'"),
        (dict.fromkeys(VARIABLES, "1") | {"RANK": "-1"}, "RANK = '-1'"),
        (dict.fromkeys(VARIABLES, "1"), "^RANK = 1 of WORLD_SIZE = 1: "),
        (dict.fromkeys(VARIABLES, "2") | {"RANK": "1"}, "LOCAL_RANK = 2 of LOCAL_WORLD_SIZE = 2"),
    ],
)
def test_inconsistent_variables_are_refused(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ParallelError, match=message) as error, process_group("cpu"):
        pass
    assert "\n" not in str(error.value)
    assert not dist.is_initialized()


@pytest.mark.parametrize("threads", [0, -1, 1.5, "many", None, True])
def test_invalid_thread_counts_are_refused(threads):
    before = torch.get_num_threads()
    with pytest.raises(ParallelError, match="threads = "), process_group("cpu", threads=threads):
        pass
    assert torch.get_num_threads() == before


def test_a_timeout_of_zero_is_refused():
    with pytest.raises(ParallelError, match="timeout = 0:00:00"), process_group("cpu", timeout=timedelta(0)):
        pass


def test_backends():
    assert backend_for("cpu") == backend_for("cpu", cpu_offload=True) == "gloo"
    assert backend_for("cuda") == "nccl"
    assert backend_for("cuda", cpu_offload=True) == "cpu:gloo,cuda:nccl"
    with pytest.raises(ParallelError, match=r"device_type = 'toaster': .*cpu, cuda"):
        backend_for("toaster")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_is_refused():
    with pytest.raises(ParallelError, match="device_type = 'cuda', but the accelerator"):
        process_group("cuda").__enter__()


def test_a_single_process_may_use_every_core():
    with process_group("cpu"):
        assert torch.get_num_threads() == available_cores()


def test_offload_on_a_cpu():
    with process_group("cpu", cpu_offload=True):
        dist.all_reduce(torch.ones(1))


@pytest.mark.cuda
@cuda
def test_nccl_and_gloo_side_by_side():
    with process_group(cpu_offload=True) as process:
        assert process.device == torch.device("cuda", 0)
        for device in ("cpu", process.device):
            dist.all_reduce(torch.ones(1, device=device))


# The tests below run this file as a rank.


def start(ranks):
    clean = {key: value for key, value in os.environ.items() if key not in (*VARIABLES, "OMP_NUM_THREADS")}
    environ = clean | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, __file__], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


AUTO = max(1, available_cores() // 2)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, AUTO),
        ({"OMP_NUM_THREADS": "3"}, None),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x"}, None),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, AUTO),  # the 1 that torchrun sets
    ],
)
def test_thread_counts_of_the_user_are_kept(environ, expected):
    assert _thread_count("auto", 2, environ) == expected
    assert _thread_count(5, 2, environ) == 5


@pytest.mark.thorough
def test_ctrl_c_in_one_rank_ends_all_ranks():
    job = start(2)
    start_time = time.monotonic()
    out, err = job.communicate(timeout=120)
    lines = [json.loads(line) for line in out.splitlines()]
    ended = {line["rank"]: line for line in lines}
    assert ended[0]["error"] == "KeyboardInterrupt", err
    assert all(line["local_rank"] == line["rank"] and line["sum"] == 3 for line in lines)
    assert ended[0]["threads"] == AUTO  # not the 1 that torchrun sets
    # Rank 1 waits for rank 0 in an all-reduce with a timeout of ten minutes. Either rank 1 fails at once, or torchrun
    # notices first that rank 0 has ended, and ends rank 1.
    assert job.returncode != 0
    assert time.monotonic() - start_time < 60
    assert all(line["handler_as_before"] and not line["up"] for line in lines)


def rank():
    before, error = signal.getsignal(signal.SIGINT), None
    try:
        with process_group("cpu") as process:
            total = torch.tensor(process.rank + 1)
            dist.all_reduce(total)
            threads = torch.get_num_threads()
            if process.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            dist.all_reduce(total.clone())
    except (KeyboardInterrupt, RuntimeError) as caught:
        error = type(caught).__name__
    line = dict(rank=process.rank, local_rank=process.local_rank, sum=total.item(), threads=threads, error=error,
                up=dist.is_initialized(), handler_as_before=signal.getsignal(signal.SIGINT) is before)  # fmt: skip
    print(json.dumps(line) + "\n", end="", flush=True)
    sys.exit(error is not None)


if __name__ == "__main__":
    rank()
