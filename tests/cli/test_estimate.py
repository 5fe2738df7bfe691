"""`titanplans estimate`, as a user calls it."""

import json
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.foresight.test_measure import OF_DEVICE, SIZES
from tests.support import rehearsals
from tests.support.programs import run_python
from titanplans import modeling
from titanplans.cli.measure import measure_rank
from titanplans.foresight.hardware import find_gpu
from titanplans.foresight.measure import measure
from titanplans.training.launch.launcher import launch_function

JOB = """
[model]
name = "{name}"
[training]
local_batch_size = 2
seq_len = 512
mixed_precision_param = "bfloat16"
[activation_checkpoint]
mode = "none"
"""
GPU = """
[tiny]
like = "H100"
memory_gib = 1
outside_gib = 0.99
gpus_per_node = 2
"""


@pytest.fixture
def estimate(tmp_path):
    (tmp_path / "cluster.toml").write_text(GPU)

    def run(*options, name="gla"):
        (tmp_path / "job.toml").write_text(JOB.format(name=name))
        result = run_python("-m", "titanplans", "estimate", "job.toml", *options, cwd=tmp_path)
        return result.returncode, result.stdout, result.stderr

    return run


def test_json_of_linear_attention(estimate, tmp_path):
    status, out, err = estimate("--json", "--nodes=1")
    assert status == 0, err
    values = json.loads(out)
    assert values["gpus"] == 8
    (rank,) = values["stages"]
    weights = sum(p.numel() for p in modeling.build(modeling.load_config("gla", "debug")).parameters()) * 4
    assert rank["parts"]["weights"] == pytest.approx(weights / 8, rel=0.01)
    # FLA's kernels keep less than the functions that replace them on a CPU.
    job = rehearsals.job(tmp_path, "training.seq_len=512", "training.mixed_precision_param=bfloat16")
    (replaced,) = rehearsals.forecasts(job, modeling.load_config("gla", "debug"), 8)
    assert rank["parts"]["activations"] < 0.7 * replaced.parts["activations"]
    assert rank["reserved"] >= rank["allocated"] == sum(rank["parts"].values())


def test_a_job_that_does_not_fit(estimate):
    status, out, err = estimate("--gpu=tiny", "--hardware=cluster.toml")
    assert (status, "does not fit: " in out) == (1, True), err
    assert "2 GPUs (tiny)" in out
    assert "of 1.0 - 1.0 for CUDA and NCCL" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu=h100"], "no such GPU; did you mean H100?"),
        (["--gpu=tiny", "--hardware=cluster.toml", "--parallelism.tensor_parallel_degree=3"], "3"),
        (["--training.enable_cpu_offload=true"], "can't be estimated"),
    ],
)
def test_what_is_refused(estimate, options, message):
    status, _, err = estimate(*options)
    assert status == 2
    assert err.startswith("error: ")
    assert message in err


def test_degrees_that_leave_no_ranks_to_fsdp(estimate):
    """The job has as many GPUs as its degrees, and not those of whole machines."""
    degrees = ("--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2")
    status, out, err = estimate(*degrees)
    assert (status, "4 GPUs (H100)" in out) == (0, True), err
    status, _, err = estimate(*degrees, "--nodes=1")
    assert (status, "is not the number of processes, 8" in err) == (2, True), err


def test_a_model_that_ends_the_process(estimate):
    """RWKV-7's host code reads the address of a tensor."""
    status, _, err = estimate(name="rwkv7")
    assert status == 2
    assert "its step on tensors without memory ended the process" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measure"], "finds no GPU of CUDA or ROCm to measure; run the command on a machine that has one"),
        (["--measure", "--output=cluster.json"], "name it cluster.toml"),
        (["--measure", "--output=cluster.toml"], "cluster.toml: it exists"),
        (["--measure", "--gpu=H100"], "unrecognized arguments: --gpu=H100"),
        (["--output=new.toml"], "this is the file of --measure"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the error without a GPU")
def test_what_can_not_be_measured(options, message, tmp_path):
    (tmp_path / "cluster.toml").write_text(GPU)
    result = run_python("-m", "titanplans", "estimate", *options, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr


NAME = 'Some "GPU" 80GB'


def measure_a_cpu(file: Path | None) -> int:
    """Measure as one rank, whose CPU stands for a GPU."""
    with (
        mock.patch("torch.cuda.get_device_name", return_value=NAME),
        mock.patch("titanplans.foresight.measure.device_keys", return_value=OF_DEVICE),
        mock.patch("titanplans.foresight.measure.measure", partial(measure, sizes=SIZES)),
    ):
        return measure_rank(file)


def test_a_measured_gpu_is_used_by_the_estimate(estimate, tmp_path):
    assert launch_function(partial(measure_a_cpu, tmp_path / "measured.toml"), 2) == 0
    status, out, err = estimate(f"--gpu={NAME}", "--hardware=measured.toml", "--json")
    assert status == 0, err
    gpu = json.loads(out)["gpu"]
    assert gpu == find_gpu(NAME, tmp_path / "measured.toml").to_dict()
    assert gpu["memory_gib"] == OF_DEVICE["memory_gib"].value
    assert gpu["gpus_per_node"] == 2


def test_a_measured_gpu_is_printed(tmp_path, capsys):
    assert measure_a_cpu(None) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    assert find_gpu(NAME, tmp_path / "printed.toml").gpus_per_node == 1
