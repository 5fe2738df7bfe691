"""Jobs with context parallelism against one process: losses, norms, counts, resumes."""

import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import zoo
from tests.support import process_groups
from tests.training.trainer.test_trainer import train, write_inputs
from titanplans.config import load_job
from titanplans.errors import OptionError, PlanError

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
JOBS = {
    "gla, tp 2 x cp 2": ("gla", (*STEPS, TP, CP)),
    "samba, cp 2 x fsdp 2": ("samba", (*HALF, CP)),
    "samba, cp 4, compiled and recomputed": (
        "samba", (*STEPS, "--parallelism.context_parallel_degree=4", *COMPILED),
    ),
    "qwen3_next, cp 2 x hsdp 2": ("qwen3_next", (*HALF, CP, *HSDP)),
    "mixtral, tp 2 x cp 2": ("mixtral", (*STEPS, TP, CP)),
    "gla, cp 2 x ddp 2, accumulated": ("gla", (*ACCUMULATED, CP, *DDP)),
    "gla, cp 2 x fsdp 2, accumulated, loss from logits": (
        "gla", (*ACCUMULATED, CP, "--parallelism.fsdp_defer_grad_sync=all", "--loss.no-fused"),
    ),
}  # fmt: skip
TUNED = {
    "lora": ("gla", ("--lora.rank=3", "--optimizer.lr=3e-2"), (*HALF, CP)),
    "qlora": ("wide", ("--lora.rank=3", "--lora.quantize_base=nf4", "--optimizer.lr=3e-2"), (*STEPS, TP, CP)),
    "muon": (
        "dense", ("--optimizer.name=Muon", "--optimizer.groups=[{pattern = 'embed|lm_head', lr = 1e-3}]"), (*HALF, CP),
    ),
}  # fmt: skip
MODELS = {
    "samba": dict(attn=dict(layers=[1], num_heads=8, num_kv_heads=2, window_size=5)),
    "qwen3_next": dict(
        layer_types=["linear_attention", "full_attention"], num_experts=4, output_router_logits=False
    ),
    "mixtral": dict(output_router_logits=True, router_aux_loss_coef=0.5),
}
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


PARTS = [
    ("--training.steps=2", *HALF[1:], *SAVES, CP),
    ("--training.steps=4", *STEPS[1:], *SAVES, TP, CP),
    ("--training.steps=6", *HALF[1:], *SAVES, *DDP, CP),
    (HALF[2], *PUBLISHED, TP),
]


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


folder, one, four = runs(MODELS | {"wide": WIDE}, JOBS, TUNED, PARTS, "gla", ("gla", *MODELS), VALIDATION)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_the_figures_of_one_process(one, four, name):
    model, options = JOBS[name]
    expected, found = one[model], four[name]
    assert expected[LOSS][3] < expected[LOSS][1] - 0.1, "a model that does not learn proves nothing"
    for key in FIGURES:
        if key == LARGEST and not set(STEPS) <= set(options):  # of several batches
            assert all(found[LOSS][step] < found[key][step] < found[LOSS][step] + 0.2 for step in (1, 2, 3))
            continue
        # float32, summed in another order, as in test_trainer.
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.parametrize("name", TUNED)
def test_adapters_and_muon_train_alike(one, four, name):
    # bfloat16 rounds what Muon orthogonalises.
    assert four[name][LOSS] == pytest.approx(one[name][LOSS], rel=1e-4 if name == "muon" else 1e-5)
    assert one[name][LOSS][3] < one[name][LOSS][1] - 0.05


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


def test_a_job_goes_on_with_other_degrees_and_its_weights_are_published(folder, one, four):
    goes_on(one["whole"], four["moved"], folder)


def test_the_report_names_the_degree_and_the_mixers(folder, four):
    report = json.loads((folder / "samba, cp 2 x fsdp 2" / "parallelism.json").read_text())
    assert report["degrees"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 1, "ep": 1}
    assert report["tensor_parallel"] is None
    assert report["context_parallel"]["regions"] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert report["data_parallel"]["shards"] == 4
    assert report["step"]["by_operation"]["all_to_all"]["collectives"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--training.seq_len=30"],
            "training.seq_len = 30: .* context_parallel_degree x 2 = 4, .*28 or 32 would work",
        ),
        (
            ["--quantize.linear.float8.recipe_name=rowwise"],
            "quantize.linear.float8.recipe_name = .*with context_parallel_degree = 2",
        ),
        ([TP, "--parallelism.data_parallel_strategy=ddp"], "tensor_parallel_degree = 2"),
    ],
)
def test_what_a_job_can_not_have_beside_it(folder, words, said):
    with pytest.raises(OptionError, match=said):
        load_job([f"{folder}/job.toml", CP, *words])


def test_more_ranks_than_heads_are_refused_before_a_process_starts(folder):
    from titanplans.training.job.checks import check_job

    words = [f"--model.config={folder}/gla.json", f"--training.dataset_path={folder}/text"]
    job = load_job([f"{folder}/job.toml", *words, "--parallelism.context_parallel_degree=8"])
    with pytest.raises(PlanError, match="context_parallel_degree = 8 does not divide num_heads = 4"):
        check_job(job, 8)
