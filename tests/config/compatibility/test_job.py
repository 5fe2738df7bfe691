"""A job's sections become a strategy, and what `parallel` refuses is told by the job's keys."""

import pytest

from titanplans.config import OptionError, rename_option_errors, strategy_of
from titanplans.config.compatibility.job import SPLIT_BACKWARD, pipeline
from titanplans.config.options import options_of
from titanplans.config.schema import build_job, keys
from titanplans.parallel import ActivationCheckpoint, Compile, DDPConfig, FSDP2Config
from titanplans.split.stages.schedules import SCHEDULES


def of(**options: object) -> FSDP2Config | DDPConfig:
    job = build_job({key.replace("__", "."): value for key, value in options.items()})
    return strategy_of(job)


DDP = {"parallelism__data_parallel_strategy": "ddp"}
EVERY_SECOND = ActivationCheckpoint(mode="selective", selective_ac_option="2")


def test_the_defaults():
    precision = {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"}
    assert of() == FSDP2Config(**precision, activation_checkpoint=EVERY_SECOND)
    assert of(**DDP) == DDPConfig(autocast_dtype="bfloat16", activation_checkpoint=EVERY_SECOND)


@pytest.mark.parametrize(
    ("given", "autocast"),
    [
        ({"training__mixed_precision_param": "float32"}, None),
        ({"training__mixed_precision_param": "float32", "training__autocast_dtype": "bfloat16"}, "bfloat16"),
        ({"training__autocast_dtype": "float32"}, "float32"),
    ],
)
def test_mixed_precision_under_ddp_is_autocast(given, autocast):
    config = of(**DDP, **given)
    assert isinstance(config, DDPConfig)
    assert config.autocast_dtype == autocast


def test_recomputation_is_the_sections():
    given = {"mode": "memory_budget", "memory_budget": 0.25, "visualize_memory_budget_pareto": True}
    config = of(
        compile__enable=True, **{f"activation_checkpoint__{key}": value for key, value in given.items()}
    )
    assert config.activation_checkpoint == ActivationCheckpoint(**given)


def test_compile_waits_for_its_switch():
    rest = {"compile__backend": "eager", "compile__dynamic": True, "compile__components": ["loss"]}
    assert of(**rest).compile == Compile()
    assert of(**rest, compile__enable=True).compile == Compile(
        enable=True, components=("loss",), backend="eager", dynamic=True
    )


REFUSED = [
    ({"training__pin_cpu_memory": True}, "training.pin_cpu_memory"),
    ({**DDP, "ddp__static_graph": True}, "ddp.static_graph"),
    ({"activation_checkpoint__mode": "keep_mixer", "compile__enable": True}, "activation_checkpoint.mode"),
    ({"compile__enable": True, "compile__mode": "default", "compile__options": {"a": 1}}, "compile.options"),
]


@pytest.mark.parametrize(("given", "option"), REFUSED)
def test_a_refusal_of_a_strategy_names_the_jobs_key(given, option):
    with pytest.raises(OptionError) as caught:
        of(**given)
    assert caught.value.option == option


def test_every_option_is_told_by_a_key_of_the_job():
    for strategy in (FSDP2Config, DDPConfig):
        for field in options_of(strategy):
            nested = options_of(type(field.default)) if hasattr(field.default, "section") else ()
            for option in [f"{field.name}.{inner.name}" for inner in nested] or [field.name]:
                with pytest.raises(OptionError) as caught, rename_option_errors():
                    raise OptionError(option, 1, "why")
                assert caught.value.option in keys()


PIPELINE = "parallelism__pipeline_parallel_"
OF_PIPELINES = [
    ({}, None),
    ({f"{PIPELINE}microbatch_size": 4, "training__local_batch_size": 8}, None),
    ({f"{PIPELINE}schedule": "ZBVZeroBubble"}, None),
    ({**DDP, f"{PIPELINE}schedule": "GPipe"}, "parallelism.pipeline_parallel_degree"),
    ({f"{PIPELINE}microbatch_size": 3, "training__local_batch_size": 8}, "training.local_batch_size"),
    (
        {f"{PIPELINE}layers_per_stage": 3, f"{PIPELINE}split_points": ["model.layers.2"]},
        "parallelism.pipeline_parallel_layers_per_stage",
    ),
    (
        {f"{PIPELINE}schedule": "DualPipeV", "activation_checkpoint__mode": "keep_mixer"},
        "parallelism.pipeline_parallel_schedule",
    ),
    (
        {
            f"{PIPELINE}microbatch_size": 2,
            "training__local_batch_size": 8,
            "validation__local_batch_size": 3,
            "validation__enable": True,
        },
        "validation.local_batch_size",
    ),
    ({"parallelism__fsdp_keep_gathered": True}, "parallelism.fsdp_keep_gathered"),
    *(
        ({f"{PIPELINE}schedule": schedule, "compile__enable": True}, "parallelism.pipeline_parallel_schedule")
        for schedule in SPLIT_BACKWARD
    ),
    (
        {f"{PIPELINE}schedule": "ZBVZeroBubble", "compile__enable": True, "compile__components": ["loss"]},
        None,
    ),
    (
        {"checkpoint__enable": True, "checkpoint__last_save_in_hf": True, "lora__rank": 4},
        "checkpoint.last_save_in_hf",
    ),
]


@pytest.mark.parametrize(("given", "option"), OF_PIPELINES)
def test_the_contradictions_of_a_pipeline(given, option):
    """Under a degree of 1 there is none."""
    job = build_job({key.replace("__", "."): value for key, value in given.items()})
    assert not list(pipeline(job))
    degree = job.parallelism.model_copy(update={"pipeline_parallel_degree": 2})
    found = [name for name, _ in pipeline(job.model_copy(update={"parallelism": degree}))]
    assert found == [option] * (option is not None)


def test_the_schedules_that_split_backwards():
    assert tuple(name for name in SCHEDULES if SCHEDULES[name].splits_backward) == SPLIT_BACKWARD
