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
OP = {"activation_checkpoint__selective_ac_option": "op"}
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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mode": "none"}, ActivationCheckpoint()),
        ({"mode": "full", "early_stop": True}, ActivationCheckpoint(mode="full", early_stop=True)),
        ({"mode": "mlp", "scope": "language"}, ActivationCheckpoint(mode="mlp", scope="language")),
        ({"mode": "keep_mixer"}, ActivationCheckpoint(mode="keep_mixer")),
        (
            {"selective_ac_option": "3", "debug": True},
            ActivationCheckpoint(mode="selective", selective_ac_option="3", debug=True),
        ),
        (
            {
                "selective_ac_option": "op",
                "per_op_sac_matmuls": "all",
                "per_op_sac_keep_attention": False,
                "per_op_sac_keep_collectives": False,
                "per_op_sac_keep_operators": ["aten::relu"],
                "per_op_sac_force_recompute_mm_shapes_by_fqns": ["q_proj"],
            },
            ActivationCheckpoint(
                mode="selective",
                selective_ac_option="op",
                per_op_sac_matmuls="all",
                per_op_sac_keep_attention=False,
                per_op_sac_keep_collectives=False,
                per_op_sac_keep_operators=("aten::relu",),
                per_op_sac_force_recompute_mm_shapes_by_fqns=("q_proj",),
            ),
        ),
    ],
)
def test_recomputation(given, expected):
    config = of(**{f"activation_checkpoint__{key}": value for key, value in given.items()})
    assert config.activation_checkpoint == expected


def test_the_memory_budget_is_drawn_into_the_jobs_folder():
    config = of(
        job__dump_folder="here",
        compile__enable=True,
        activation_checkpoint__mode="memory_budget",
        activation_checkpoint__memory_budget=0.25,
        activation_checkpoint__visualize_memory_budget_pareto=True,
        parallelism__tensor_parallel_degree=2,
    )
    assert config.activation_checkpoint == ActivationCheckpoint(
        mode="memory_budget", memory_budget=0.25, visualize_memory_budget_pareto=True
    )


def test_compile_waits_for_its_switch():
    rest = {"compile__backend": "eager", "compile__dynamic": True, "compile__components": ["loss"]}
    assert of(**rest).compile == Compile()
    assert of(**rest, compile__enable=True).compile == Compile(
        enable=True, components=("loss",), backend="eager", dynamic=True
    )


REFUSED = [
    (
        {"parallelism__fsdp_backward_prefetch": 2, "parallelism__fsdp_reshard_after_forward": "never"},
        "parallelism.fsdp_backward_prefetch",
    ),
    ({"training__pin_cpu_memory": True}, "training.pin_cpu_memory"),
    ({"training__autocast_dtype": "float32"}, "training.autocast_dtype"),
    ({**DDP, "ddp__static_graph": True}, "ddp.static_graph"),
    ({**DDP, "ddp__split_compiled_blocks": True}, "ddp.split_compiled_blocks"),
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
