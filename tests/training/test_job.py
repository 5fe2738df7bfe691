"""A job becomes torchtitan's configuration, and no key of it gets lost on the way."""

import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from titanplans.config import ConfigError, JobConfig
from titanplans.config.compatibility.groups import OF_MUON
from titanplans.config.schema import build_job, keys
from titanplans.config.values import describe
from titanplans.training.trainer.device import prepare_device

prepare_device()  # before torchtitan, which the next lines import

from titanplans.training.job.torchtitan_config import trainer_config  # noqa: E402
from titanplans.training.trainer.trainer import Trainer  # noqa: E402


def configure(world_size: int = 1, **options: object) -> Trainer.Config:
    return trainer_config(
        build_job({key.replace("__", "."): value for key, value in options.items()}), world_size
    )


# A value other than the default for keys whose type does not suggest one that may be given alone.
ANOTHER = {
    "model.config_overrides": {"max_position_embeddings": 64},
    "data.documents": "joined",
    "data.sources": ({"name": "a"}, {"name": "b"}),
    "model.name": "transformer",
    "model.flavor": "340M",
    "training.global_batch_size": 16,
    "training.chat.roles": {"bard": "assistant"},
    "training.chat.chat_template_kwargs": {"mood": "glad"},
    "parallelism.data_parallel_shard_degree": 4,
    "optimizer.groups": [{"pattern": "norm", "lr": 0.25}],
    "lr_scheduler.total_steps": 20000,
    "lr_scheduler.decay_ratio": 0.5,
    "activation_checkpoint.selective_ac_option": "3",
    "compile.components": ["loss", "optimizer"],
    "compile.options": {"max_autotune": True},
    "checkpoint.exclude_from_loading": ["dataloader"],
}

# What a key needs beside it to mean anything.
OP = {"activation_checkpoint.selective_ac_option": "op"}
COMPILED = {"compile.enable": True}
BUDGET = {"activation_checkpoint.mode": "memory_budget"} | COMPILED
DDP = {"parallelism.data_parallel_strategy": "ddp"}
TP = {"parallelism.tensor_parallel_degree": 2}
ASYNC = COMPILED | TP | {"parallelism.enable_async_tensor_parallel": True}
MUON = {"optimizer.name": "Muon"}
LORA = {"lora.rank": 4}
SAVES = {"checkpoint.enable": True}
STARTS = SAVES | {"checkpoint.initial_load_path": "/somewhere"}
FLOAT8 = {"quantize.linear.float8.recipe_name": "tensorwise"}
GATHER = FLOAT8 | {"quantize.linear.float8.enable_fsdp_float8_all_gather": True}
CHAT = {"training.chat.enable": True}
OF_SECTIONS = {
    "quantize.linear.float8": FLOAT8,
    "compile": COMPILED,
    "training.chat": CHAT,
    "ddp": DDP,
    "lora": LORA,
}
BESIDE = {
    **{key: OF_SECTIONS[keys()[key].section] for key in keys() if keys()[key].section in OF_SECTIONS},
    **{key: {} for key in (*COMPILED, *CHAT, *LORA, *FLOAT8)},
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": GATHER,
    **{key: OP for key in keys() if ".per_op_sac_" in key},
    "activation_checkpoint.memory_budget": BUDGET,
    "activation_checkpoint.visualize_memory_budget_pareto": BUDGET,
    "parallelism.enable_async_tensor_parallel": COMPILED | TP,
    "parallelism.async_tensor_parallel_unfused": ASYNC,
    "parallelism.expert_capacity_factor": {"parallelism.expert_parallel_degree": 2},
    "parallelism.data_parallel_strategy": {"parallelism.data_parallel_replicate_degree": 4},
    "model.plan": TP,
    "compile.components": COMPILED | {"optimizer.implementation": "foreach"},
    **{f"optimizer.{key}": MUON for key in OF_MUON},
    "debug.deterministic_warn_only": {"debug.deterministic": True},
    "training.skip_nan_inf_limit": {"training.skip_nan_inf": True},
    "training.pin_cpu_memory": {"training.enable_cpu_offload": True},
    "ddp.static_graph": DDP | {"ddp.defer_grad_sync": False},
    "ddp.split_compiled_blocks": DDP | COMPILED,
    "data.long_documents": {"data.packing": "best_fit"},
    **{
        f"checkpoint.{key}": SAVES
        for key in ("initial_load_path", "load_step", "create_seed_checkpoint", "load_only", "save_on_signal")
    },
    "checkpoint.last_save_in_hf": SAVES,
    "checkpoint.initial_load_model_only": STARTS,
    "checkpoint.initial_load_in_hf": STARTS | {"model.name": "gla"},
    "checkpoint.initial_adapter_path": SAVES | LORA,
    "checkpoint.save_adapters_only": STARTS | LORA,
    **{
        f"{section}.dataloader.{key}": {f"{section}.dataloader.num_workers": 2}
        for section in ("training", "validation")
        for key in ("persistent_workers", "prefetch_factor")
    },
}

# Keys that act elsewhere, and where that is tested.
ELSEWHERE = {
    "job.description": "test_config_load",
    "model.config": "below",
    "model.class": "tests/test_out_of_tree.py",
    "model.arguments": "tests/test_out_of_tree.py",
    "parallelism.pipeline_parallel_schedule": "tests/training/test_pipeline_jobs.py",
    "parallelism.pipeline_parallel_layers_per_stage": "tests/training/test_pipeline_jobs.py",
    "parallelism.pipeline_parallel_split_points": "tests/parallel/pipeline/test_balance.py",
    "parallelism.context_parallel_degree": "test_context_jobs",
    "parallelism.enable_fsdp_symm_mem": "torchtitan asks for a GPU of compute capability 9",
    "experimental.custom_import": "test_checks",
}


def words_of(hint: Any) -> list[Any]:
    """Return the words that a type, or a part of it, names."""
    inside = [word for part in get_args(hint) for word in words_of(part)]
    return list(get_args(hint)) if get_origin(hint) is Literal else inside


@pytest.mark.parametrize("name", [name for name in keys() if name not in ELSEWHERE])
def test_every_key_reaches_torchtitan(name):
    key = keys()[name]
    match key.default:
        case _ if name in ANOTHER:
            value = ANOTHER[name]
        case _ if words := [word for word in words_of(key.hint) if word not in (None, key.default)]:
            value = words[0]
        case _ if describe(key.hint).startswith("true or false"):
            value = not key.default
        case int():
            value = abs(key.default) + 1
        case float():
            value = key.default + 1 if key.default >= 1 else 0.25
        case str():
            value = "other"
        case tuple():
            value = ("other",)
        case _:
            value = "other" if "a string" in describe(key.hint) or name == "model.plan" else 3
    world_size = 4 if name.startswith(("parallelism.", "model.plan")) else 1
    beside = {other.replace(".", "__"): given for other, given in BESIDE.get(name, {}).items()}
    before = configure(world_size, **beside)
    after = configure(world_size, **beside | {name.replace(".", "__"): value})
    assert _acting(after) != _acting(before)


def _acting(config: Any) -> dict[str, Any]:
    """Return all of a config but what goes into a checkpoint's card, which holds every key."""
    values = config.to_dict()
    del values["checkpoint"]["job"]
    return values


def test_what_every_job_needs_of_torchtitan():
    config = trainer_config(JobConfig(), 1)
    assert config.parallelism.spmd_backend == "partial_dtensor"
    assert config.training.disable_cuda_graphs


def test_a_model_from_a_file():
    path = str(Path(__file__).parents[2] / "configs" / "gla_debug.json")
    spec = configure(model__config=path).model_spec
    assert spec is not None
    assert (spec.name, spec.model.hf_config.model_type) == (path, "gla")


@pytest.mark.parametrize(
    ("world_size", "options", "expected"),
    [
        (1, {}, 8),
        (4, {"parallelism__tensor_parallel_degree": 2}, 16),
        (4, {"parallelism__tensor_parallel_degree": 2, "training__gradient_accumulation_steps": 3}, 48),
        (4, {"parallelism__tensor_parallel_degree": 4, "training__global_batch_size": 64}, 64),
    ],
)
def test_the_global_batch(world_size, options, expected):
    assert configure(world_size, **options).training.global_batch_size == expected


def test_the_number_of_processes_is_torchruns(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert trainer_config(JobConfig()).training.global_batch_size == 32
    assert trainer_config(JobConfig()).training.max_norm == 1.0
    assert trainer_config(build_job({"training.max_norm": 0})).training.max_norm == math.inf
    with pytest.raises(ConfigError, match="does not divide the number of processes, 4"):
        trainer_config(build_job({"parallelism.tensor_parallel_degree": 3, "training.seq_len": 48}))


def test_validation_is_as_training_where_nothing_else_is_said():
    config = configure(training__seq_len=64, training__dataset="local", training__dataset_path="here")
    validator = config.validator
    assert (validator.own_seq_len, validator.own_batch_size) == (64, 8)
    (source,) = validator.dataloader.data.sources
    assert (source.dataset_path, source.dataset_split) == ("here", "validation")
    mixed = configure(
        data__sources=({"dataset_path": "a", "weight": 2.0}, {"dataset_path": "b", "text_column": "x"})
    )
    of = mixed.validator.dataloader.data.sources
    assert [(s.dataset_path, s.dataset_split, s.text_column) for s in of] == [
        ("a", "validation", "text"),
        ("b", "validation", "x"),
    ]


def test_a_validation_set_of_its_own_does_not_take_the_training_path():
    config = configure(training__dataset_path="here", validation__dataset="stdlib")
    assert config.validator.dataloader.data.sources[0].dataset_path is None


@pytest.mark.parametrize(("steps", "expected"), [(5, 200), (500, 500)])
def test_a_run_shorter_than_its_warm_up_stays_in_it(steps, expected):
    assert configure(training__steps=steps).lr_scheduler.total_steps == expected


def test_a_relative_checkpoint_is_taken_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = configure(checkpoint__enable=True, checkpoint__initial_load_path="a/step-3")
    assert config.checkpoint.initial_load_path == str(tmp_path / "a" / "step-3")
