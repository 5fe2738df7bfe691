"""Checks before a process group exists: each error, and jobs that pass."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import save

from tests.support import refusals
from titanplans import modeling
from titanplans.config import JobConfig, load_job
from titanplans.errors import OptionError
from titanplans.training.checkpoint.manifest import Manifest, describe_changes
from titanplans.training.checkpoint.match import compared_fields, describe_model_changes
from titanplans.training.checkpoint.storage import CheckpointWriter
from titanplans.training.job.checks import check_job
from titanplans.training.job.resolve import fewest_processes


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that makes a job from dotted options, on a tiny data set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for index in range(40):
        (tmp_path / "text" / f"{index}.txt").write_text("all work and no play makes jack a dull boy\n" * 40)
    (tmp_path / "job.toml").write_text(
        "[training]\ndataset_path = 'text'\nseq_len = 64\n[activation_checkpoint]\nmode = 'none'\n"
    )

    def job(**options: object) -> JobConfig:
        arguments = [f"--{key.replace('__', '.')}={value}" for key, value in options.items()]
        return load_job(["job.toml", *arguments])

    return job


def refusal(job: JobConfig, world_size: int = 1) -> str:
    return refusals.refusal(check_job, job, world_size)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (2, {"parallelism__tensor_parallel_degree": 2}),
        (4, {"parallelism__tensor_parallel_degree": 2, "training__global_batch_size": 32}),
        (8, {"model__name": "transformer", "parallelism__tensor_parallel_degree": 8, "validation__enable": "true"}),
        (2, {"parallelism__tensor_parallel_degree": 2, "parallelism__disable_loss_parallel": "true"}),
        (
            2,
            {
                "parallelism__data_parallel_strategy": "ddp",
                "parallelism__data_parallel_replicate_degree": 2,
                "training__mixed_precision_param": "float32",
            },
        ),
    ],
)  # fmt: skip
def test_correct_jobs_pass(job, world_size, options):
    check_job(job(**options), world_size)


def test_a_check_of_a_debug_flavor_takes_seconds(job):
    job_of_options = job(parallelism__tensor_parallel_degree=2)
    check_job(job_of_options, 2)  # the first call imports the libraries
    begin = time.perf_counter()
    check_job(job_of_options, 2)
    assert time.perf_counter() - begin < 5


PARALLEL = [
    (
        2,
        {"tensor_parallel_degree": 3, "enable_sequence_parallel": "false"},
        r"parallelism.tensor_parallel_degree = 3 does not divide .*, 2: 1 or 2 .*start 3",
    ),
    (1, {"tensor_parallel_degree": 2}, r"does not divide .*, 1: 1 .*start 2"),
    (
        4,
        {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 4},
        r"tensor_parallel_degree x data_parallel_replicate_degree = 2 x 4 = 8 .*, 4: 1, 2 or 4 .*start 8",
    ),
    (
        4,
        {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 4},
        r"tensor_parallel_degree x data_parallel_shard_degree = 2 x 4 = 8 is not .*, 4: .*start 8",
    ),
    (16, {"tensor_parallel_degree": 16}, "tensor_parallel_degree = 16 does not divide"),
    (2, {"data_parallel_strategy": "ddp"}, r"parallelism.data_parallel_replicate_degree = 1 is not .*, 2: .*start 1"),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "options", "message"), PARALLEL)
def test_degrees_have_to_fit_the_processes_and_the_model(job, world_size, options, message):
    job_of_options = job(**{f"parallelism__{key}": value for key, value in options.items()})
    assert re.search(message, refusal(job_of_options, world_size))


def test_the_experts_have_to_fit_the_ranks(job):
    """If the shard degree is unset, it becomes the degree that the experts need; a degree that is set is not changed."""
    options = {"model__name": "qwen3_moe", "parallelism__expert_parallel_degree": 4}
    assert fewest_processes(job(**options)) == 4
    assert fewest_processes(job(**options, parallelism__tensor_parallel_degree=2)) == 4
    check_job(job(**options), 4)
    message = refusal(job(**options, parallelism__data_parallel_shard_degree=2), 2)
    assert "expert_parallel_degree = 4 does not divide" in message
    assert message.endswith("1 or 2 would, or a data_parallel_shard_degree that is a multiple of 4")
    assert "1 or 2 would" in refusal(job(**options), 2)


def test_the_batch_has_to_fit_the_data_parallel_degree(job):
    job_of_options = job(training__global_batch_size=24, parallelism__tensor_parallel_degree=2)
    assert re.match(r"training.global_batch_size = 24 .* = 8 x 2 = 16; 16 or 32", refusal(job_of_options, 4))


def test_the_sequence_length_has_to_be_divisible_in_training(job):
    options = {"parallelism__tensor_parallel_degree": 2, "training__seq_len": 63}
    with pytest.raises(
        OptionError, match=r"multiple of tensor_parallel_degree = 2, .*62 or 64 would work, or "
    ):
        job(**options)
    check_job(job(**options, parallelism__enable_sequence_parallel="false"), 2)
    check_job(
        job(**options | {"training__seq_len": 64}, validation__enable="true", validation__seq_len=31), 2
    )
    options = {"parallelism__context_parallel_degree": 2, "training__seq_len": 62}
    with pytest.raises(
        OptionError, match=r"multiple of context_parallel_degree x 2 = 4, .*60 or 64 would work$"
    ):
        job(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model__config": "nowhere.json"}, "nowhere.json"),
        ({"model__hf_assets_path": "nowhere"}, "nowhere"),
        ({"training__dataset_path": "nowhere"}, "nowhere"),
        (
            {"validation__enable": "true", "validation__dataset_path": "nowhere"},
            "[validation] dataset_path = 'nowhere': ",
        ),
        (
            {"experimental__custom_import": "no_such_module"},
            "no module named 'no_such_module'; run in its folder",
        ),
        (
            {"activation_checkpoint__mode": "full", "activation_checkpoint__scope": "vision"},
            'activation_checkpoint.scope = "vision": GLAForCausalLM has no vision tower',
        ),
    ],
)
def test_missing_files_and_modules_are_refused(job, options, message):
    assert message in refusal(job(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"profiling__enable_memory_snapshot": "true"},
        {"training__enable_cpu_offload": "true"},
        {"checkpoint__async_mode": "async_with_pinned_mem"},
        {"optimizer__implementation": "fused_opt_states_bf16"},
        {"parallelism__enable_fsdp_symm_mem": "true"},
        {"training__mixed_precision_param": "float32", "training__autocast_dtype": "float32"},
        {
            "parallelism__tensor_parallel_degree": 2,
            "parallelism__enable_async_tensor_parallel": "true",
            "compile__enable": "true",
        },
    ],
    ids=lambda options: list(options)[-1],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA can do it")
def test_options_that_need_cuda_are_refused(job, options):
    assert "needs CUDA, but this machine" in refusal(job(**options), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parallelism__data_parallel_strategy": "ddp"},
            'training.mixed_precision_param = "bfloat16" means autocast here, which flash-linear-attention',
        ),
        ({"training__autocast_dtype": "bfloat16"}, "on this CPU leave it out"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerator can do it")
def test_autocast_of_linear_attention_on_a_cpu_is_refused(job, options, message):
    assert message in refusal(job(**options))


def test_wandb_has_to_be_installed(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # None makes an import fail
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "metrics.enable_wandb = true needs wandb, which is not installed" in refusal(
        job(metrics__enable_wandb="true")
    )


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(job, tmp_path):
    config = modeling.load_config("gla", "debug", vocab_size=1024)
    config.save_pretrained(tmp_path)
    message = refusal(job(model__config=str(tmp_path / "config.json")))
    assert "has 4096 tokens" in message
    assert "vocab_size = 1024" in message


def test_a_penalty_in_the_loss_of_the_model_is_refused(job, tmp_path):
    modeling.load_config("rwkv7", "debug", use_l2warp=True).save_pretrained(tmp_path)
    message = refusal(job(model__config=str(tmp_path / "config.json")))
    assert "use_l2warp = True" in message
    assert "set use_l2warp = false" in message


def test_groups_of_parameters_have_to_fit_the_model(job):
    message = refusal(job(optimizer__groups="[{pattern = 'self_attn', lr = 1e-3}]"))
    assert 'optimizer.groups, table 1 (pattern = "self_attn"): it matches no parameter' in message


def test_a_module_of_the_user_is_imported(job, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_plans_for_a_test.py").write_text("")
    check_job(job(experimental__custom_import="my_plans_for_a_test"), 1)
    assert "my_plans_for_a_test" in sys.modules


# ---------------------------------------------------------------- checkpoints


def test_a_manifest_distinguishes_models_but_not_kernels():
    config = modeling.load_config("gla", "debug")
    ours = compared_fields(config)
    assert compared_fields(modeling.load_config("gla", "debug", fuse_norm=not config.fuse_norm)) == ours
    theirs = compared_fields(modeling.load_config("gla", "debug", num_heads=4, use_short_conv=True))
    assert describe_changes(ours, theirs) == "num_heads = 8, now 4; use_short_conv = false, now true"


def test_incidental_fields_are_ignored_in_nested_configs_too():
    config = modeling.load_config("gemma3", "debug")
    ours = compared_fields(config)
    values = json.loads(config.to_json_string(use_diff=False))
    for sub_config in (config, config.text_config, config.vision_config):
        sub_config.dtype = torch.bfloat16
    config.text_config.use_cache = not config.text_config.use_cache
    assert compared_fields(config) == ours
    assert describe_model_changes(values, config) == ""  # the manifest of an earlier version
    config.text_config.head_dim, config.vision_config.image_size = 64, 112
    message = "text_config.head_dim = 32, now 64; vision_config.image_size = 56, now 112"
    assert describe_model_changes(ours, config) == message
    assert describe_model_changes(ours, config, ["head_dim", "image_size"]) == ""


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Return uninitialized tensors of the weights of the debug GLA, by name."""
    model = modeling.build(modeling.load_config("gla", "debug"))
    return {name: torch.empty(tensor.shape) for name, tensor in model.state_dict().items()}


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor], **more: Any) -> None:
    """Write a checkpoint as the manager does, with `heads` in its manifest and optimizer state for `moments`."""
    config = modeling.load_config("gla", "debug", num_heads=more.pop("heads", 8))
    moments = more.pop("moments", weights)
    holds = "training" if more else "weights"
    manifest = Manifest(int(folder.name.removeprefix("step-")), holds, compared_fields(config), {}, {})
    if more:
        more |= {f"optimizer.state.{name}.exp_avg": torch.empty(1) for name in moments}
    save(weights | more, storage_writer=CheckpointWriter(folder, manifest), no_dist=True)


def test_a_checkpoint_of_another_model_is_refused(job, tmp_path, weights):
    folder = tmp_path / "outputs" / "checkpoint"
    job_of_options = job(checkpoint__enable="true")
    check_job(job_of_options, 1)
    write_checkpoint(folder / "step-5", weights, **{"train_state.step": torch.tensor(5)})
    check_job(job_of_options, 1)
    message = refusal(job(checkpoint__enable="true", model__name="transformer"))
    assert "step-5 is of another model" in message
    # The shapes are the same, but the manifest has another number of heads.
    write_checkpoint(folder / "step-6", weights, heads=4, **{"train_state.step": torch.tensor(6)})
    assert "num_heads = 4, now 8" in refusal(job_of_options)


def test_a_checkpoint_of_another_optimizer_is_refused(job, tmp_path, weights):
    folder = tmp_path / "outputs" / "checkpoint"
    write_checkpoint(folder / "step-5", weights, **{"train_state.step": torch.tensor(5)})
    muon = {"checkpoint__enable": "true", "optimizer__name": "Muon"}
    message = refusal(job(**muon))
    assert "step-5 holds exp_avg of model.layers.0.attn.q_proj.weight, but Muon" in message
    assert "needs momentum_buffer" in message
    check_job(job(**muon, checkpoint__exclude_from_loading="optimizer,dataloader"), 1)


def test_a_checkpoint_without_any_optimizer_state_is_refused(job, tmp_path, weights):
    folder = tmp_path / "outputs" / "checkpoint"
    write_checkpoint(folder / "step-5", weights, moments=(), **{"train_state.step": torch.tensor(5)})
    assert "step-5 holds no optimizer state; begin with new optimizer states" in refusal(
        job(checkpoint__enable="true")
    )


def test_a_parameter_that_had_no_gradient_needs_no_state(job, tmp_path, weights):
    folder = tmp_path / "outputs" / "checkpoint"
    with_gradients = [name for name in weights if "embed" not in name]
    write_checkpoint(
        folder / "step-5", weights, moments=with_gradients, **{"train_state.step": torch.tensor(5)}
    )
    check_job(job(checkpoint__enable="true"), 1)


def test_a_checkpoint_of_the_weights_alone_starts_a_job_but_resumes_none(job, tmp_path, weights):
    write_checkpoint(tmp_path / "outputs" / "checkpoint" / "step-5", weights)
    assert "holds only the weights" in refusal(job(checkpoint__enable="true"))
    initial = str(tmp_path / "outputs" / "checkpoint" / "step-5")
    elsewhere = {
        "checkpoint__enable": "true",
        "checkpoint__folder": "other",
        "checkpoint__initial_load_path": initial,
    }
    check_job(job(**elsewhere), 1)
    assert "holds only the weights" in refusal(job(**elsewhere, checkpoint__initial_load_model_only="false"))


def test_truncated_files_of_a_checkpoint_without_manifest_are_named(job, tmp_path, weights):
    """A checkpoint of torchtitan, from which a job starts: it has no checksums, but an index with lengths of shards."""
    initial = tmp_path / "theirs"
    save(weights, checkpoint_id=initial, no_dist=True)
    job_of_options = job(checkpoint__enable="true", checkpoint__initial_load_path=str(initial))
    check_job(job_of_options, 1)
    index, shard = initial / ".metadata", initial / "__0_0.distcp"
    contents = {path: path.read_bytes() for path in (index, shard)}
    for length in (0, 1, len(contents[shard]) // 2, len(contents[shard]) - 1):
        shard.write_bytes(contents[shard][:length])
        assert f"checkpoint.initial_load_path: {shard} is truncated" in refusal(job_of_options)
    shard.unlink()
    assert f"{shard} is truncated" in refusal(job_of_options)
    shard.write_bytes(contents[shard])
    for length in (0, 1, len(contents[index]) // 2, len(contents[index]) - 1):
        index.write_bytes(contents[index][:length])
        message = refusal(job_of_options)
        assert message.startswith(f"{index} is damaged (")
        assert message.endswith("; take another checkpoint")
    index.unlink()
    assert f'"{initial}" is not a checkpoint' in refusal(job_of_options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint__load_step": 7}, "checkpoint.load_step = 7: there is no"),
        ({"checkpoint__initial_load_path": "nowhere"}, '"nowhere" is not a checkpoint'),
    ],
)
def test_missing_checkpoints_are_refused(job, options, message):
    assert message in refusal(job(checkpoint__enable="true", **options))


def test_a_seed_checkpoint_is_saved_by_one_process(job):
    job_of_options = job(checkpoint__enable="true", checkpoint__create_seed_checkpoint="true")
    check_job(job_of_options, 1)
    assert "needs 1 process, not 2, since the weights are saved unsharded; start one process" in refusal(
        job_of_options, 2
    )


def test_the_model_is_refused_before_the_tokenizer_and_the_data(job, tmp_path):
    """Options are checked before the tokenizer and the data are read, which takes seconds, or half a minute without the
    hub."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen33"}')
    message = refusal(
        job(model__config="config.json", model__hf_assets_path="/nowhere", training__dataset="a/b")
    )
    assert message.startswith("model config 'config.json': model_type 'qwen33'")
