"""A job's sections become a strategy, and what `parallel` refuses is told by the job's keys."""

import pytest

from titanplans.config import OptionError, rename_option_errors, strategy_of
from titanplans.config.options import options_of
from titanplans.config.schema import build_job, keys
from titanplans.parallel import ActivationCheckpoint, Compile, DDPConfig, FSDP2Config


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
