"""Jobs with context parallelism, compared with one process: losses, norms, counts, and resumed jobs."""

import json

import pytest

from tests.support.job_comparison import (
    ACCUMULATED,
    COMPILED,
    CP,
    DDP,
    EXPORTED,
    HALF_BATCH,
    HSDP,
    LOSS,
    MAX_LOSS,
    METRICS,
    SAVES,
    STEPS,
    TP,
    VALIDATION,
    WIDE,
    check_resumed,
    runs,
)
from titanplans.config import load_job
from titanplans.errors import OptionError, PlanError

JOBS = {
    "gla, tp 2 x cp 2": ("gla", (*STEPS, TP, CP)),
    "samba, cp 2 x fsdp 2": ("samba", (*HALF_BATCH, CP)),
    "samba, cp 4, compiled and recomputed": (
        "samba", (*STEPS, "--parallelism.context_parallel_degree=4", *COMPILED),
    ),
    "qwen3_next, cp 2 x hsdp 2": ("qwen3_next", (*HALF_BATCH, CP, *HSDP)),
    "mixtral, tp 2 x cp 2": ("mixtral", (*STEPS, TP, CP)),
    "gla, cp 2 x ddp 2, accumulated": ("gla", (*ACCUMULATED, CP, *DDP)),
    "gla, cp 2 x fsdp 2, accumulated, loss from logits": (
        "gla", (*ACCUMULATED, CP, "--parallelism.fsdp_defer_grad_sync=all", "--loss.no-fused"),
    ),
}  # fmt: skip
TUNED = {
    "lora": ("gla", ("--lora.rank=3", "--optimizer.lr=3e-2"), (*HALF_BATCH, CP)),
    "qlora": ("wide", ("--lora.rank=3", "--lora.quantize_base=nf4", "--optimizer.lr=3e-2"), (*STEPS, TP, CP)),
    "muon": (
        "dense", ("--optimizer.name=Muon", "--optimizer.groups=[{pattern = 'embed|lm_head', lr = 1e-3}]"), (*HALF_BATCH, CP),
    ),
}  # fmt: skip
MODELS = {
    "samba": dict(attn=dict(layers=[1], num_heads=8, num_kv_heads=2, window_size=5)),
    "qwen3_next": dict(
        layer_types=["linear_attention", "full_attention"], num_experts=4, output_router_logits=False
    ),
    "mixtral": dict(output_router_logits=True, router_aux_loss_coef=0.5),
}


SEGMENTS = [
    ("--training.steps=2", *HALF_BATCH[1:], *SAVES, CP),
    ("--training.steps=4", *STEPS[1:], *SAVES, TP, CP),
    ("--training.steps=6", *HALF_BATCH[1:], *SAVES, *DDP, CP),
    (HALF_BATCH[2], *EXPORTED, TP),
]


folder, one_rank, four_ranks = runs(
    MODELS | {"wide": WIDE}, JOBS, TUNED, SEGMENTS, "gla", ("gla", *MODELS), VALIDATION
)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_the_metrics_of_one_process(one_rank, four_ranks, name):
    model, options = JOBS[name]
    expected, actual = one_rank[model], four_ranks[name]
    assert expected[LOSS][3] < expected[LOSS][1] - 0.1, "a model that does not learn proves nothing"
    for key in METRICS:
        if key == MAX_LOSS and not set(STEPS) <= set(options):  # the maximum is over several batches here
            assert all(
                actual[LOSS][step] < actual[key][step] < actual[LOSS][step] + 0.2 for step in (1, 2, 3)
            )
            continue
        # float32, summed in another order, as in test_trainer.
        assert actual[key] == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.parametrize("name", TUNED)
def test_adapters_and_muon_train_as_in_one_process(one_rank, four_ranks, name):
    # Muon rounds matrices to bfloat16 before it orthogonalises them.
    assert four_ranks[name][LOSS] == pytest.approx(one_rank[name][LOSS], rel=1e-4 if name == "muon" else 1e-5)
    assert one_rank[name][LOSS][3] < one_rank[name][LOSS][1] - 0.05


def test_a_job_resumes_at_other_degrees_and_its_weights_are_exported(folder, one_rank, four_ranks):
    check_resumed(one_rank["uninterrupted"], four_ranks["resumed"], folder)


def test_the_report_names_the_degree_and_the_mixers(folder, four_ranks):
    report = json.loads((folder / "samba, cp 2 x fsdp 2" / "parallelism.json").read_text())
    assert report["degrees"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 1, "ep": 1}
    assert report["tensor_parallel"] is None
    assert report["context_parallel"]["regions"] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert report["data_parallel"]["shards"] == 4
    assert report["step"]["by_operation"]["all_to_all"]["collectives"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_options_that_exclude_context_parallelism_are_refused(folder, arguments, message):
    with pytest.raises(OptionError, match=message):
        load_job([f"{folder}/job.toml", CP, *arguments])


def test_more_ranks_than_heads_are_refused_before_a_process_starts(folder):
    from titanplans.training.job.checks import check_job

    arguments = [f"--model.config={folder}/gla.json", f"--training.dataset_path={folder}/text"]
    job = load_job([f"{folder}/job.toml", *arguments, "--parallelism.context_parallel_degree=8"])
    with pytest.raises(PlanError, match="context_parallel_degree = 8 does not divide num_heads = 4"):
        check_job(job, 8)
