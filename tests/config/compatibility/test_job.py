"""The sections of a job become a strategy, and errors of `parallel` name the keys of the job."""

import pytest

from titanplans.config import OptionError, rename_option_errors, strategy_of
from titanplans.config.compatibility.job import SPLIT_BACKWARD, pipeline
from titanplans.config.options import options_of
from titanplans.config.schema import build_job, keys
from titanplans.parallel import ActivationCheckpoint, Compile, DDPConfig, FSDP2Config
from titanplans.split.stages.schedules import SCHEDULES


def strategy_from(**options: object) -> FSDP2Config | DDPConfig:
    job = build_job({key.replace("__", "."): value for key, value in options.items()})
    return strategy_of(job)


DDP = {"parallelism__data_parallel_strategy": "ddp"}
EVERY_SECOND = ActivationCheckpoint(mode="selective", selective_ac_option="2")


def test_the_defaults():
    precision = {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"}
    assert strategy_from() == FSDP2Config(**precision, activation_checkpoint=EVERY_SECOND)
    assert strategy_from(**DDP) == DDPConfig(autocast_dtype="bfloat16", activation_checkpoint=EVERY_SECOND)


@pytest.mark.parametrize(
    ("options", "autocast"),
    [
        ({"training__mixed_precision_param": "float32"}, None),
        ({"training__mixed_precision_param": "float32", "training__autocast_dtype": "bfloat16"}, "bfloat16"),
        ({"training__autocast_dtype": "float32"}, "float32"),
    ],
)
def test_mixed_precision_under_ddp_is_autocast(options, autocast):
    config = strategy_from(**DDP, **options)
    assert isinstance(config, DDPConfig)
    assert config.autocast_dtype == autocast


def test_recomputation_has_the_options_of_its_section():
    options = {"mode": "memory_budget", "memory_budget": 0.25, "visualize_memory_budget_pareto": True}
    config = strategy_from(
        compile__enable=True, **{f"activation_checkpoint__{key}": value for key, value in options.items()}
    )
    assert config.activation_checkpoint == ActivationCheckpoint(**options)


def test_options_of_compile_need_its_switch():
    options = {"compile__backend": "eager", "compile__dynamic": True, "compile__components": ["loss"]}
    assert strategy_from(**options).compile == Compile()
    assert strategy_from(**options, compile__enable=True).compile == Compile(
        enable=True, components=("loss",), backend="eager", dynamic=True
    )


REFUSED = [
    ({"training__pin_cpu_memory": True}, "training.pin_cpu_memory"),
    ({**DDP, "ddp__static_graph": True}, "ddp.static_graph"),
    ({"activation_checkpoint__mode": "keep_mixer", "compile__enable": True}, "activation_checkpoint.mode"),
    ({"compile__enable": True, "compile__mode": "default", "compile__options": {"a": 1}}, "compile.options"),
]


@pytest.mark.parametrize(("options", "option"), REFUSED)
def test_a_refusal_of_a_strategy_names_the_key_of_the_job(options, option):
    with pytest.raises(OptionError) as caught:
        strategy_from(**options)
    assert caught.value.option == option


def test_every_option_has_a_key_of_the_job():
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


@pytest.mark.parametrize(("options", "option"), OF_PIPELINES)
def test_the_contradictions_of_a_pipeline(options, option):
    """With a pipeline degree of 1, no options contradict each other."""
    job = build_job({key.replace("__", "."): value for key, value in options.items()})
    assert not list(pipeline(job))
    degree = job.parallelism.model_copy(update={"pipeline_parallel_degree": 2})
    contradictions = [name for name, _ in pipeline(job.model_copy(update={"parallelism": degree}))]
    assert contradictions == [option] * (option is not None)


def test_the_schedules_that_split_the_backward():
    assert tuple(name for name in SCHEDULES if SCHEDULES[name].splits_backward) == SPLIT_BACKWARD
