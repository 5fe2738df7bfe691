"""Jobs over four ranks against the same job in one process, and a job that goes on at other degrees."""

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

HALF = (*STEPS[:2], "--training.local_batch_size=4")

HSDP = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")

DDP = ("--parallelism.data_parallel_strategy=ddp", "--parallelism.data_parallel_replicate_degree=2")

VALIDATION = ("--validation.enable", "--validation.freq=2", "--validation.steps=2", "--validation.seq_len=30")

LARGEST, LOSS = "loss_metrics/global_max_loss", "loss_metrics/global_avg_loss"

FIGURES = (LOSS, LARGEST, "grad_norm", "n_tokens_seen", "validation_metrics/loss")

DROPPED = "experts/dropped"

LOADS = ("experts/busiest_to_mean", "experts/idle", "experts/largest_bias", DROPPED)

SAVES = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last_save_model_only")

PUBLISHED = ("--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.last_save_in_hf")

ACCUMULATED = (
    *HALF[:2], "--training.local_batch_size=2", "--training.gradient_accumulation_steps=2",
    "--validation.local_batch_size=4",
)  # fmt: skip

COMPILED = ("--compile.enable", "--compile.backend=aot_eager", "--activation_checkpoint.mode=full")

WIDE = dict(
    num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=64, intermediate_size=128
)  # fmt: skip


def inputs(folder: Path, **configs: dict) -> Path:
    """Write a job, its data, and the configs of these models, with these fields."""
    write_inputs(folder)
    for name, fields in configs.items():
        config = zoo.config("qwen3" if name == "wide" else name, options=False, vocab_size=4096, **fields)
        (folder / f"{name}.json").write_text(config.to_json_string(use_diff=False))
    return folder


def figures(folder: Path, model: str, dump: str, *options: str) -> dict[str, dict[int, float]]:
    recorder, _ = train(folder, model, dump, *options)
    return {name: found for name in FIGURES + LOADS if (found := recorder.losses(name))}


def on_one_rank(rank: int, models: Iterable[str], tuned: dict, whole: str, options: tuple = ()) -> dict:
    folder = Path(os.environ["TEST_FOLDER"])
    found = {name: figures(folder, name, f"{name} alone", *STEPS, *options) for name in models}
    for name, (model, given, _) in tuned.items():
        found[name] = figures(folder, model, f"{name} alone", *STEPS, *given)
    found["whole"] = figures(folder, whole, "whole", STEPS[2], *PUBLISHED)
    return found


def on_four_ranks(
    rank: int, jobs: dict, tuned: dict, whole: str, parts: list[tuple], options: tuple = ()
) -> dict:
    folder = Path(os.environ["TEST_FOLDER"])
    found = {name: figures(folder, model, name, *given, *options) for name, (model, given) in jobs.items()}
    for name, (model, given, degrees) in tuned.items():
        found[name] = figures(folder, model, name, *degrees, *given)
    found["moved"] = [figures(folder, whole, "moved", *part) for part in parts]
    return found


def runs(
    models: dict, jobs: dict, tuned: dict, parts: list, whole: str, alone: Iterable[str], options: tuple = ()
):
    """Return the fixtures of a file of jobs: their folder, and what one rank and four logged. One spawn of each size."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory):
        return inputs(tmp_path_factory.mktemp("jobs"), **models)

    @pytest.fixture(scope="module")
    def one(folder):
        return process_groups.run(
            partial(on_one_rank, models=[*alone], tuned=tuned, whole=whole, options=options), 1
        )

    @pytest.fixture(scope="module")
    def four(folder):
        run = partial(on_four_ranks, jobs=jobs, tuned=tuned, whole=whole, parts=parts, options=options)
        return process_groups.run(run, 4)

    return folder, one, four


def goes_on(one: dict, parts: list[dict], folder: Path, rel: float = 1e-5, **atol: float) -> dict:
    """Check that a job that went on with other degrees trained as one process did; return the weights published."""
    losses = {step: loss for part in parts for step, loss in part[LOSS].items()}
    assert list(losses) == list(range(1, 9))
    assert losses == pytest.approx(one[LOSS], rel=rel)
    moved, whole = (
        load_file(folder / name / "checkpoint" / "step-8" / "model.safetensors")
        for name in ("moved", "whole")
    )
    assert list(moved) == list(whole)
    for name, weight in whole.items():
        limit = atol.get(name.rpartition(".")[2], 1e-3)
        torch.testing.assert_close(moved[name], weight, rtol=0, atol=limit, msg=name)
    return whole
