"""Jobs with pipeline parallelism, compared with one process: losses, norms, counts, and resumed jobs."""

import pytest

from tests.support.job_comparison import (
    ACCUMULATED,
    COMPILED,
    CP,
    EXPORTED,
    HALF_BATCH,
    LOSS,
    MAX_LOSS,
    SAVES,
    STEPS,
    TP,
    VALIDATION,
    WIDE,
    check_resumed,
    runs,
)
from titanplans.config import load_job
from titanplans.errors import OptionError, ParallelError

PP = ("--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatch_size=2")
MORE = ("--parallelism.pipeline_parallel_degree=4", "--parallelism.pipeline_parallel_microbatch_size=1")
LAYERS = "--parallelism.pipeline_parallel_layers_per_stage=1"
EP = "--parallelism.expert_parallel_degree=2"
MODELS = {
    "gla": dict(num_hidden_layers=4),
    "rwkv7": dict(num_hidden_layers=4),
    "llama": dict(num_hidden_layers=4, tie_word_embeddings=True),
    "glm4_moe": dict(num_hidden_layers=3),
    "wide": WIDE | dict(num_hidden_layers=2),
}


def schedule(name):
    return f"--parallelism.pipeline_parallel_schedule={name}"


JOBS = {
    "gla, pp 2 x tp 2, stages by names": (
        "gla", (*STEPS, *PP, TP, "--parallelism.pipeline_parallel_split_points=['model.layers.3']"),
    ),
    "gla, pp 4, GPipe": ("gla", (*STEPS, *MORE, schedule("GPipe"))),
    "gla, pp 2 x fsdp 2, Interleaved1F1B": ("gla", (*HALF_BATCH, *PP, schedule("Interleaved1F1B"), LAYERS)),
    "gla, pp 2 x tp 2, DualPipeV": (
        "gla", (*STEPS, *PP[:1], "--parallelism.pipeline_parallel_microbatch_size=1", TP, schedule("DualPipeV")),
    ),
    "rwkv7, pp 2 x fsdp 2, ZBVZeroBubble, accumulated": (
        "rwkv7", (*ACCUMULATED, *PP[:1], "--parallelism.pipeline_parallel_microbatch_size=1", schedule("ZBVZeroBubble")),
    ),
    "llama, pp 2 x cp 2, tied": ("llama", (*STEPS, *PP, CP)),
    "llama, pp 2 x fsdp 2, tied, compiled and recomputed": ("llama", (*HALF_BATCH, *PP, *COMPILED)),
    "llama, pp 2 x tp 2, tied, InterleavedZeroBubble": (
        "llama", (*STEPS, *PP, TP, schedule("InterleavedZeroBubble")),
    ),
    "glm4_moe, pp 2 x tp 2, ep 2": ("glm4_moe", (*STEPS, *PP, TP, EP)),
}  # fmt: skip
TUNED = {
    # Its head uses the embedding and the output of every block.
    "user's model": ("tests.support.pipeline_models:SumOfAllStates", ("--optimizer.lr=3e-2",), (*HALF_BATCH, *PP)),
    "lora": ("gla", ("--lora.rank=3", "--optimizer.lr=3e-2"), (*HALF_BATCH, *PP)),
    "qlora": ("wide", ("--lora.rank=3", "--lora.quantize_base=nf4", "--optimizer.lr=3e-2"), (*STEPS, *PP, TP)),
    "float8": (
        "wide", ("--quantize.linear.float8.recipe_name=rowwise_with_gw_hp", "--quantize.linear.float8.emulate"),
        (*HALF_BATCH, *PP),
    ),
    "muon": (
        "llama", ("--optimizer.name=Muon", "--optimizer.groups=[{pattern = 'embed', lr = 1e-3}]"), (*STEPS, *PP, TP),
    ),
}  # fmt: skip
SEGMENTS = [
    ("--training.steps=2", *HALF_BATCH[1:], *SAVES, *PP),
    ("--training.steps=4", *STEPS[1:], *SAVES, TP, *PP, schedule("Interleaved1F1B")),
    ("--training.steps=6", *HALF_BATCH[1:], *SAVES, TP),
    (STEPS[2], *EXPORTED, TP, *PP),
]


folder, one_rank, four_ranks = runs(MODELS, JOBS, TUNED, SEGMENTS, "llama", {*MODELS} - {"wide"}, VALIDATION)


@pytest.mark.thorough
@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_the_metrics_of_one_process(one_rank, four_ranks, name):
    expected, actual = one_rank[JOBS[name][0]], four_ranks[name]
    assert expected[LOSS][3] < expected[LOSS][1] - 0.1, "a model that does not learn proves nothing"
    assert ("experts/largest_bias" in expected) == ("glm4_moe" in name)
    for key in expected:
        if key != MAX_LOSS:  # the maximum is over several batches, if a step has them
            # float32, summed in another order, as in test_trainer; even without a pipeline, tensor parallelism
            # alone changes the norm by 7e-5 in step 3.
            assert actual[key] == pytest.approx(expected[key], rel=2e-4 if key == "grad_norm" else 1e-5), key


@pytest.mark.thorough
@pytest.mark.parametrize("name", TUNED)
def test_user_models_adapters_float8_and_muon_train_as_in_one_process(one_rank, four_ranks, name):
    # Muon rounds matrices to bfloat16 before it orthogonalises them.
    assert four_ranks[name][LOSS] == pytest.approx(one_rank[name][LOSS], rel=1e-4 if name == "muon" else 1e-5)
    assert one_rank[name][LOSS][3] < one_rank[name][LOSS][1] - 0.05


@pytest.mark.thorough
def test_a_job_resumes_at_other_degrees_and_its_weights_are_exported(folder, one_rank, four_ranks):
    check_resumed(one_rank["uninterrupted"], four_ranks["resumed"], folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PP, "--parallelism.data_parallel_strategy=ddp"], "DDP replicates the full model"),
        (["--parallelism.pipeline_parallel_microbatch_size=3", PP[0]], "local_batch_size.*would work"),
    ],
)
def test_options_that_exclude_a_pipeline_are_refused(folder, arguments, message):
    with pytest.raises(OptionError, match=message):
        load_job([f"{folder}/job.toml", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PP[1:], "--parallelism.pipeline_parallel_degree=8"], "8 stages of 4 blocks"),
        ([*PP, schedule("Interleaved1F1B"), "--parallelism.pipeline_parallel_layers_per_stage=2"], "1 stage per rank"),
        ([*PP, "--parallelism.pipeline_parallel_split_points=['model.layers.9']"], "is not one of the 4 blocks"),
        ([PP[0], "--parallelism.pipeline_parallel_microbatch_size=4"], "1F1B with 1 micro batch"),
    ],
)  # fmt: skip
def test_bad_stages_are_refused_before_a_process_starts(folder, arguments, message):
    from titanplans.training.job.checks import check_job

    config = [f"--model.config={folder}/gla.json", f"--training.dataset_path={folder}/text"]
    job = load_job([f"{folder}/job.toml", *config, *arguments])
    with pytest.raises(ParallelError, match=message):
        check_job(job, 8)
