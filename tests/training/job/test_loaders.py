"""Every key of a job changes something that the job is built from, or is used directly by a file in `READERS`."""

import ast
from typing import Any, Literal, get_args, get_origin

import pytest

from tests.support.paths import ROOT
from titanplans.config import ConfigError, JobConfig, strategy_of
from titanplans.config.compatibility.groups import OF_MUON
from titanplans.config.compatibility.job import schedule_steps
from titanplans.config.schema import build_job, keys
from titanplans.config.values import describe
from titanplans.training.job import loaders, resolve
from titanplans.training.trainer import documents

ENGINE = ROOT / "titanplans" / "training"
READERS = (
    *(
        "trainer/trainer.py",
        "trainer/computation.py",
        "trainer/loss.py",
        "trainer/model.py",
        "launch/processes.py",
    ),
    *("launch/rank.py", "checkpoint/manager.py", "checkpoint/resume.py", "checkpoint/folder.py"),
)
"""Files that use options directly; `acting` does not return these options."""
PASSED_SECTIONS = ("metrics", "profiling", "lr_scheduler", "debug")
"""Sections that are passed as keyword arguments, so that unknown options raise."""


def configured(**options: object) -> JobConfig:
    return build_job({key.replace("__", "."): value for key, value in options.items()})


def acting(job: JobConfig, world_size: int = 1) -> dict[str, Any]:
    """Return what a job's options become. The manifest of its checkpoints is left out, because it has every key."""
    config = resolve.hf_config(job)
    keyword = documents.document_keyword(job, config)
    are_apart = documents.are_apart(job, keyword)
    return {
        "strategy": strategy_of(job),
        "shard_degree": job.parallelism.shard_degree,
        "model": (config.to_dict(), keyword, resolve.model_name(job), resolve.tokenizer_path(job)),
        "data": loaders.training_loader(job, world_size, documents_apart=are_apart),
        "validation": loaders.validation_loader(
            job, resolve.validation_data(job), world_size, documents_apart=are_apart
        ),
        "sizes": (resolve.validation_data(job), resolve.training_data(job)),
        "batch": resolve.global_batch_size(job, resolve.data_parallel_degree(job, world_size)),
        "optimizers": (job.optimizer, *(job.compile.enable, job.compile.components)),
        "schedule": schedule_steps(job),
        "traces": resolve.trace_buf_size(job),
        "sections": [vars(getattr(job, section)) for section in PASSED_SECTIONS],
    }


def read_one_by_one() -> set[str]:
    """Return the names of the attributes that the files of `READERS` use."""
    trees = [ast.parse((ENGINE / file).read_text()) for file in READERS]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


# Values other than the default, for keys whose type does not suggest one that is valid by itself.
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

# Options that a key needs to have an effect.
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
NEEDED = {
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
    "model.derive": TP,
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

# Keys that have an effect only elsewhere, with the test of each.
ELSEWHERE = {
    "job.description": "test_config_load",
    "model.config": "below",
    "model.class": "tests/test_out_of_tree.py",
    "model.arguments": "tests/test_out_of_tree.py",
    "parallelism.pipeline_parallel_schedule": "tests/training/test_pipeline_jobs.py",
    "parallelism.pipeline_parallel_layers_per_stage": "tests/training/test_pipeline_jobs.py",
    "parallelism.pipeline_parallel_split_points": "tests/parallel/pipeline/test_balance.py",
    "parallelism.context_parallel_degree": "test_context_jobs",
    "experimental.custom_import": "test_checks",
}


def literal_values(hint: Any) -> list[Any]:
    """Return the values of a Literal type, also inside of other types."""
    nested = [value for argument in get_args(hint) for value in literal_values(argument)]
    return list(get_args(hint)) if get_origin(hint) is Literal else nested


@pytest.mark.parametrize("name", [name for name in keys() if name not in ELSEWHERE])
def test_every_key_has_an_effect(name):
    key = keys()[name]
    match key.default:
        case _ if name in ANOTHER:
            value = ANOTHER[name]
        case _ if choices := [
            choice for choice in literal_values(key.hint) if choice not in (None, key.default)
        ]:
            value = choices[0]
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
    world_size = 4 if name.startswith(("parallelism.", "model.plan", "model.derive")) else 1
    needed = {other.replace(".", "__"): setting for other, setting in NEEDED.get(name, {}).items()}
    before, after = configured(**needed), configured(**needed | {name.replace(".", "__"): value})
    if acting(after, world_size) == acting(before, world_size):
        assert name.rpartition(".")[2] in read_one_by_one()


def test_a_model_config_from_a_file():
    path = str(ROOT / "configs" / "gla_debug.json")
    job = configured(model__config=path)
    assert (resolve.model_name(job)[0], resolve.hf_config(job).model_type) == (path, "gla")


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
    job = configured(**options)
    assert resolve.global_batch_size(job, resolve.data_parallel_degree(job, world_size)) == expected


def test_degrees_that_do_not_divide_the_world_size_are_refused():
    job = build_job({"parallelism.tensor_parallel_degree": 3, "training.seq_len": 48})
    with pytest.raises(ConfigError, match="does not divide the number of processes, 4"):
        resolve.data_parallel_degree(job, 4)


def test_validation_uses_the_options_of_training_by_default():
    job = configured(training__seq_len=64, training__dataset="local", training__dataset_path="here")
    validation = resolve.validation_data(job)
    assert (validation.seq_len, validation.local_batch_size) == (64, 8)
    (source,) = validation.sources
    assert (source.dataset_path, source.dataset_split) == ("here", "validation")
    mixed = configured(
        data__sources=({"dataset_path": "a", "weight": 2.0}, {"dataset_path": "b", "text_column": "x"})
    )
    sources = loaders.validation_loader(
        mixed, resolve.validation_data(mixed), 1, documents_apart=False
    ).data.sources
    assert [(s.dataset_path, s.dataset_split, s.text_column) for s in sources] == [
        ("a", "validation", "text"),
        ("b", "validation", "x"),
    ]


def test_a_separate_validation_set_does_not_use_the_path_of_training():
    job = configured(training__dataset_path="here", validation__dataset="stdlib")
    assert resolve.validation_data(job).sources[0].dataset_path is None


@pytest.mark.parametrize(("steps", "expected"), [(5, 200), (500, 500)])
def test_a_run_shorter_than_its_warm_up_stays_in_it(steps, expected):
    assert schedule_steps(configured(training__steps=steps)) == expected
