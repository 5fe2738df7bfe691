"""A job that needs more memory than there is, as computed from its sizes, is refused before a process starts.

A job that needs much of the memory logs how much.
"""

import logging

import pytest
import torch

from tests.support import refusals
from titanplans import modeling
from titanplans.config import ConfigError, load_job
from titanplans.parallel import memory as device_memory
from titanplans.training.job.checks import check_job
from titanplans.training.trainer import memory
from titanplans.training.trainer.memory import check_memory

GB = 10**9


@pytest.fixture
def job(tmp_path):
    """Return a function that makes a job of the smallest llama from options."""
    (tmp_path / "job.toml").write_text("model.name = 'llama'\ntraining.seq_len = 64\n")

    def job(*arguments: str):
        return load_job([str(tmp_path / "job.toml"), *arguments])

    return job


@pytest.fixture(scope="module")
def model():
    return modeling.build(modeling.load_config("llama", "debug"))


def refusal(job, model, ranks: int = 1, device_type: str = "cpu") -> str:
    return refusals.refusal(check_memory, job, model, ranks, device_type, kind=ConfigError)


@pytest.mark.parametrize(
    ("arguments", "begins", "largest_use"),
    [
        (
            ["--training.local_batch_size", "2147483648", "--loss.no-fused"],
            "training.local_batch_size = 2147483648, seq_len = 64: the job needs at least 1,129,198.",
            "1,125,899.9 GB of it for the logits",
        ),
        (
            ["--training.gradient_accumulation_steps", "2147483648"],
            "training.gradient_accumulation_steps = 2147483648, local_batch_size = 8, seq_len = 64: ",
            "26,388.3 GB of it for the tokens of a step",
        ),
        (
            ["--training.global_batch_size", str(8 * 2**31)],
            "training.global_batch_size = 17179869184, local_batch_size = 8, seq_len = 64: ",
            "26,388.3 GB of it for the tokens of a step",
        ),
        (
            ["--comm.trace_buf_size", str(2**31 - 1)],
            "comm.trace_buf_size = 2147483647: the job needs at least 1,099.6 GB",
            "1,099.5 GB of it for the events",
        ),
        (
            [
                "--validation.enable",
                "--validation.local_batch_size",
                "2147483648",
                "--training.disable_loss_parallel",
                "--loss.no-fused",
            ],
            "validation.local_batch_size = 2147483648, seq_len = 64: ",
            "of it for the logits of a batch",
        ),
    ],
)
def test_a_job_larger_than_memory_is_refused_with_the_value_and_both_sizes(
    job, model, arguments, begins, largest_use
):
    message = refusal(job(*arguments), model)
    assert message.startswith(begins)
    assert largest_use in message


def test_processes_larger_than_memory_are_refused(job, model):
    message = refusal(job("--training.dataloader.num_workers", "2147483648"), model)
    assert message.startswith(
        "training.dataloader.num_workers = 2147483648: the job needs at least 72,057,594."
    )
    many = ("--parallelism.tensor_parallel_degree", "1000000", "--parallelism.no-enable_sequence_parallel")
    message = refusal(job(*many), model, 1_000_000)
    assert message.startswith("parallelism.tensor_parallel_degree = 1000000: ")
    assert message.endswith(": lower a degree")


def test_a_buffer_size_beyond_32_bits_is_refused(job):
    """torch reads the size as a 32-bit integer, and aborts if it is larger."""
    with pytest.raises(ConfigError, match=r"comm\.trace_buf_size 2147483648: expected"):
        job("--comm.trace_buf_size", "2147483648")


def test_sharded_parameters_gradients_and_moments_are_counted_by_shard(job):
    """Each of 8,030,261,248 parameters (with gradient and two moments) needs 16 bytes in float32, and 8 in bfloat16."""
    large = modeling.build(modeling.load_config("llama", "3.1-8B"))
    named = ["--model.name", "llama", "--model.flavor", "3.1-8B", "--training.dataset", "stdlib"]
    assert "128.5 GB of it for 8,030,261,248 parameters" in refusal(job(*named), large)
    split = job(
        *named,
        "--parallelism.tensor_parallel_degree",
        "2",
        "--parallelism.data_parallel_replicate_degree",
        "2",
    )
    # Two replicas are sharded over two ranks each: twice the memory of one replica.
    message = refusal(split, large, 4)
    assert "257.0 GB of it for 8,030,261,248 parameters" in message
    assert "split among 2" in message
    replicated = job(
        *named,
        *("--parallelism.data_parallel_strategy", "ddp", "--parallelism.data_parallel_replicate_degree", "4"),
        *("--training.dtype", "bfloat16", "--training.mixed_precision_param", "bfloat16"),
    )
    assert "257.0 GB of it for 8,030,261,248" in refusal(replicated, large, 4)


def test_a_large_job_logs_its_memory(job, model, monkeypatch, caplog):
    # Logits of 1024 x 64 x 4096 in bfloat16: 0.54 GB
    large = job("--training.local_batch_size", "1024", "--loss.no-fused")
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(memory, "memory", lambda device: 2 * GB)
        check_memory(large, model, 1, "cpu")
        assert caplog.messages == []
        monkeypatch.setattr(memory, "memory", lambda device: GB)
        check_memory(large, model, 1, "cpu")
    (message,) = caplog.messages
    assert message.startswith("training.local_batch_size = 1024, seq_len = 64: the job needs at least 0.6 GB")
    assert message.endswith("and this machine has 1.0 GB")
    # refused, because 4 processes need 4 times the memory of one
    assert "0.6 GB of memory in 4 processes" not in refusal(large, model, 4)


def test_memory_on_the_gpu_and_on_the_host_are_checked_separately(job, model, monkeypatch):
    """The GPU holds weights and logits; the host the batches of a step, for every process on the machine."""
    sizes = {"cuda": 0.5 * GB, "cpu": 100 * GB}
    monkeypatch.setattr(memory, "memory", lambda device: int(sizes[device.type]))
    message = refusal(job("--training.local_batch_size", "1024", "--loss.no-fused"), model, 8, "cuda")
    assert "in one process, 0.5 GB of it for the logits" in message
    assert "and each GPU has 0.5 GB" in message
    check_memory(job("--training.local_batch_size", "512", "--loss.no-fused"), model, 8, "cuda")
    sizes["cpu"] = GB
    # 20000 x 8 x 64 x 24 bytes: 0.25 GB per process
    accumulated = job("--training.gradient_accumulation_steps", "20000")
    check_memory(accumulated, model, 2, "cuda")
    message = refusal(accumulated, model, 8, "cuda")
    assert "of it for the tokens of a step" in message
    assert "this machine has 1.0 GB" in message
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # 8 processes on four machines
    check_memory(accumulated, model, 8, "cuda")


def test_a_job_is_checked(job, monkeypatch):
    monkeypatch.setattr(memory, "memory", lambda device: GB)
    with pytest.raises(ConfigError, match=r"^training.gradient_accumulation_steps = 200000, .* 1.0 GB"):
        check_job(job("--training.gradient_accumulation_steps", "200000"), 1)
    check_job(job(), 1)


def test_the_limit_of_a_container_applies(tmp_path, monkeypatch):
    files = [tmp_path / "memory.max", tmp_path / "limit_in_bytes"]
    monkeypatch.setattr(device_memory, "_LIMITS", tuple(map(str, files)))
    total = device_memory.memory(torch.device("cpu"))
    files[0].write_text("max\n")
    files[1].write_text(f"{2**63 - 4096}\n")
    assert device_memory.memory(torch.device("cpu")) == total
    files[0].write_text(f"{2**28}\n")
    assert device_memory.memory(torch.device("cpu")) == 2**28
