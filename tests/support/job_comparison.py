"""Compare jobs on four ranks with the same jobs in one process. Some jobs are resumed at other degrees of parallelism."""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import zoo
from tests.support import process_groups
from tests.support.trained_jobs import train, write_inputs

CP, TP = "--parallelism.context_parallel_degree=2", "--parallelism.tensor_parallel_degree=2"

STEPS = ("--training.steps=3", "--lr_scheduler.total_steps=8", "--training.local_batch_size=8")

HALF_BATCH = (*STEPS[:2], "--training.local_batch_size=4")

HSDP = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")

DDP = ("--parallelism.data_parallel_strategy=ddp", "--parallelism.data_parallel_replicate_degree=2")

VALIDATION = ("--validation.enable", "--validation.freq=2", "--validation.steps=2", "--validation.seq_len=30")

MAX_LOSS, LOSS = "loss_metrics/global_max_loss", "loss_metrics/global_avg_loss"

METRICS = (LOSS, MAX_LOSS, "grad_norm", "n_tokens_seen", "validation_metrics/loss")

DROPPED = "experts/dropped"

LOADS = ("experts/busiest_to_mean", "experts/idle", "experts/largest_bias", DROPPED)

SAVES = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last_save_model_only")

EXPORTED = ("--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.last_save_in_hf")

ACCUMULATED = (
    *HALF_BATCH[:2], "--training.local_batch_size=2", "--training.gradient_accumulation_steps=2",
    "--validation.local_batch_size=4",
)  # fmt: skip

COMPILED = ("--compile.enable", "--compile.backend=aot_eager", "--activation_checkpoint.mode=full")

WIDE = dict(
    num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=64, intermediate_size=128
)  # fmt: skip


def inputs(folder: Path, **configs: dict) -> Path:
    """Write a job, its data, and for each keyword argument a model config with these fields; return `folder`."""
    write_inputs(folder)
    for name, fields in configs.items():
        config = zoo.config("qwen3" if name == "wide" else name, options=False, vocab_size=4096, **fields)
        (folder / f"{name}.json").write_text(config.to_json_string(use_diff=False))
    return folder


def metrics(folder: Path, model: str, dump: str, *options: str) -> dict[str, dict[int, float]]:
    recorder, _ = train(folder, model, dump, *options)
    return {name: by_step for name in METRICS + LOADS if (by_step := recorder.losses(name))}


def on_one_rank(rank: int, models: Iterable[str], tuned: dict, resumed: str, options: tuple = ()) -> dict:
    folder = Path(os.environ["TEST_FOLDER"])
    results = {name: metrics(folder, name, f"{name} alone", *STEPS, *options) for name in models}
    for name, (model, of_job, _) in tuned.items():
        results[name] = metrics(folder, model, f"{name} alone", *STEPS, *of_job)
    results["uninterrupted"] = metrics(folder, resumed, "uninterrupted", STEPS[2], *EXPORTED)
    return results


def on_four_ranks(
    rank: int, jobs: dict, tuned: dict, resumed: str, segments: list[tuple], options: tuple = ()
) -> dict:
    folder = Path(os.environ["TEST_FOLDER"])
    results = {
        name: metrics(folder, model, name, *of_job, *options) for name, (model, of_job) in jobs.items()
    }
    for name, (model, of_job, degrees) in tuned.items():
        results[name] = metrics(folder, model, name, *degrees, *of_job)
    results["resumed"] = [metrics(folder, resumed, "resumed", *segment) for segment in segments]
    return results


def runs(
    models: dict,
    jobs: dict,
    tuned: dict,
    segments: list,
    resumed: str,
    alone: Iterable[str],
    options: tuple = (),
):
    """Return the fixtures of a test file: the folder of its jobs, and their metrics on one rank and on four ranks.

    Args:
        models: the config fields of each model.
        jobs: the model and the options of each job on four ranks.
        tuned: the model, the options and the degrees of each job that runs on one rank and on four ranks.
        segments: the options of several runs that together train one job. Each run resumes from the checkpoint of the run
            before it.
        resumed: the model of the job that `segments` train.
        alone: the models that are also trained on one rank.
        options: further options of all jobs except `tuned`.
    """

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory):
        return inputs(tmp_path_factory.mktemp("jobs"), **models)

    @pytest.fixture(scope="module")
    def one(folder):
        return process_groups.run(
            partial(on_one_rank, models=[*alone], tuned=tuned, resumed=resumed, options=options), 1
        )

    @pytest.fixture(scope="module")
    def four(folder):
        run = partial(
            on_four_ranks, jobs=jobs, tuned=tuned, resumed=resumed, segments=segments, options=options
        )
        return process_groups.run(run, 4)

    return folder, one, four


def check_resumed(one: dict, segments: list[dict], folder: Path, rel: float = 1e-5, **atol: float) -> dict:
    """Check that a job resumed at other degrees trained as one process did; return the weights of this process."""
    losses = {step: loss for segment in segments for step, loss in segment[LOSS].items()}
    assert list(losses) == list(range(1, 9))
    assert losses == pytest.approx(one[LOSS], rel=rel)
    resumed, uninterrupted = (
        load_file(folder / name / "checkpoint" / "step-8" / "model.safetensors")
        for name in ("resumed", "uninterrupted")
    )
    assert list(resumed) == list(uninterrupted)
    for name, weight in uninterrupted.items():
        limit = atol.get(name.rpartition(".")[2], 1e-3)
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=limit, msg=name)
    return uninterrupted
