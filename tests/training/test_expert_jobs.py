"""Jobs with expert parallelism, compared with one process: losses, norms, loads, biases, and resumed jobs."""

import json

import pytest

from tests.support.job_comparison import (
    COMPILED,
    CP,
    DROPPED,
    EXPORTED,
    HALF_BATCH,
    LOSS,
    MAX_LOSS,
    SAVES,
    STEPS,
    TP,
    check_resumed,
    runs,
)
from titanplans.config import load_job
from titanplans.errors import ConfigError, OptionError

EP, ALL = "--parallelism.expert_parallel_degree=2", "--parallelism.expert_parallel_degree=4"
QUARTER = (*STEPS[:2], "--training.local_batch_size=2")
HSDP = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2")
BALANCED = dict(output_router_logits=True, router_aux_loss_coef=0.5)
MODELS = {
    "qwen3_moe": dict(**BALANCED),
    "mixtral": dict(**BALANCED),
    "glm4_moe": dict(num_hidden_layers=3),
    "gpt_oss": dict(**BALANCED),
    "llama4_text": {},
}
JOBS = {
    "qwen3_moe, tp 2 x fsdp 2, ep 2": ("qwen3_moe", (*HALF_BATCH, TP, EP)),
    "qwen3_moe, tp 2 x cp 2, ep 4": ("qwen3_moe", (*STEPS, TP, CP, ALL)),
    "mixtral, tp 2 x fsdp 2, ep 4": ("mixtral", (*HALF_BATCH, TP, ALL)),
    "glm4_moe, hsdp 2 x 2, ep 2, accumulated": (  # Mixtral's load-balancing loss depends on the batch
        "glm4_moe", (*STEPS[:2], "--training.local_batch_size=1", "--training.gradient_accumulation_steps=2", *HSDP, EP),
    ),
    "glm4_moe, fsdp 4, ep 2, compiled and recomputed": ("glm4_moe", (*QUARTER, EP, *COMPILED)),
    "glm4_moe, cp 2 x fsdp 2, ep 4": ("glm4_moe", (*HALF_BATCH, CP, ALL)),
    "glm4_moe, tp 2 x fsdp 2, by width": ("glm4_moe", (*HALF_BATCH, TP)),
    "gpt_oss, fsdp 4, ep 4": ("gpt_oss", (*QUARTER, ALL)),
    "llama4_text, tp 2 x fsdp 2, ep 4": ("llama4_text", (*HALF_BATCH, TP, ALL)),
    "qwen3_moe, fsdp 4, ep 4, room for all": ("qwen3_moe", (*QUARTER, ALL, "--parallelism.expert_capacity_factor=16")),
}  # fmt: skip
TUNED = {
    "lora": ("qwen3_moe", ("--lora.rank=3", "--optimizer.lr=3e-2"), (*HALF_BATCH, TP, EP)),
    "muon": ("glm4_moe", ("--optimizer.name=Muon",), (*HALF_BATCH, TP, ALL)),
    "float8": (
        "glm4_moe",
        ("--quantize.linear.float8.recipe_name=tensorwise", "--quantize.linear.float8.emulate"),
        (*QUARTER, ALL),
    ),
}
CAPACITY = ("qwen3_moe", (*HALF_BATCH, TP, ALL, "--parallelism.expert_capacity_factor=0.5"))
SEGMENTS = [
    ("--training.steps=2", *QUARTER[1:], *SAVES, EP),
    ("--training.steps=4", *HALF_BATCH[1:], *SAVES, TP, ALL),
    ("--training.steps=6", *HALF_BATCH[1:], *SAVES, TP),
    (HALF_BATCH[2], *EXPORTED, CP, EP),
]


folder, one_rank, four_ranks = runs(
    MODELS, JOBS | {"capacity": CAPACITY}, TUNED, SEGMENTS, "glm4_moe", MODELS
)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_the_metrics_of_one_process(one_rank, four_ranks, name):
    expected, actual = one_rank[JOBS[name][0]], four_ranks[name]
    assert expected[LOSS][3] < expected[LOSS][1] - 0.1, "a model that does not learn proves nothing"
    assert ("experts/largest_bias" in expected) == ("glm4_moe" in name)
    for key in expected.keys() - {MAX_LOSS}:  # the maximum is over several batches, if a step has them
        # float32, summed in another order, as in test_trainer; loads are counts of tokens.
        assert actual[key] == pytest.approx(expected[key], rel=1e-5), key


def test_dropped_tokens_are_counted(four_ranks):
    """The capacity is half of the mean load, so at least half of all pairs of token and expert are dropped, but not all."""
    pairs = 2 * 8 * 32 * 2  # blocks, sequences, tokens, experts per token
    assert set(four_ranks["qwen3_moe, fsdp 4, ep 4, room for all"][DROPPED].values()) == {0}
    assert all(pairs / 2 <= dropped < pairs for dropped in four_ranks["capacity"][DROPPED].values())
    assert four_ranks["capacity"][LOSS][3] < four_ranks["capacity"][LOSS][1]


@pytest.mark.parametrize("name", TUNED)
def test_adapters_muon_and_float8_train_as_in_one_process(one_rank, four_ranks, name):
    # Muon rounds matrices to bfloat16 before it orthogonalises them. In float8 each rank has its own scale, and float8
    # rounds by 2^-4.
    rel = {"muon": 1e-4, "float8": 2e-3}.get(name, 1e-5)
    assert four_ranks[name][LOSS] == pytest.approx(one_rank[name][LOSS], rel=rel)
    assert one_rank[name][LOSS][3] < one_rank[name][LOSS][1] - 0.03


def test_a_job_resumes_at_other_degrees_and_its_weights_are_exported(folder, one_rank, four_ranks):
    # Within eight steps, a token with two nearly equal scores may go to another expert. Then a load that was just above
    # the mean may be just below it, so the bias moves up by 0.001 instead of down.
    weights = check_resumed(
        one_rank["uninterrupted"], four_ranks["resumed"], folder, rel=5e-5, e_score_correction_bias=4e-3
    )
    assert any(name.endswith("e_score_correction_bias") and weight.any() for name, weight in weights.items())


def test_the_report_names_the_degree_and_the_mixtures(folder, four_ranks):
    report = json.loads((folder / "qwen3_moe, tp 2 x fsdp 2, ep 2" / "parallelism.json").read_text())
    assert report["degrees"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "ep": 2}
    assert report["expert_parallel"]["experts"] == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
    assert report["step"]["by_operation"]["all_to_all"]["collectives"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TP, "--parallelism.expert_parallel_degree=3"], "tensor_parallel_degree = 2, .* 2 or 4 would work"),
        (["--parallelism.data_parallel_strategy=ddp", EP], "DDP replicates the full model"),
        ([EP, "--parallelism.expert_tensor_parallel_degree=2"], "each rank holds some experts in full"),
    ],
)
def test_options_that_exclude_expert_parallelism_are_refused(folder, arguments, message):
    with pytest.raises((ConfigError, OptionError), match=message):
        load_job([f"{folder}/job.toml", *arguments])
