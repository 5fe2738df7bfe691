"""Strategies: options are checked at construction, and NeMo Automodel's names are accepted."""

import pytest
import torch
from pydantic import ValidationError

from tests.support.tiny_model import TinyPlan
from titanplans.config import ActivationCheckpoint as AC
from titanplans.config import Compile, DDPConfig, FSDP2Config, MegatronFSDPConfig, read_strategy
from titanplans.errors import ConfigError, OptionError


def test_options_are_frozen_and_nested_ones_may_be_tables():
    config = FSDP2Config(compile={"enable": True, "components": ["loss"]})
    assert config.compile == Compile(enable=True, components=("loss",))
    with pytest.raises(ValidationError):
        config.enable_cpu_offload = True
    assert DDPConfig(bucket_cap_mb=4) == DDPConfig(bucket_cap_mb=4.0)


@pytest.mark.parametrize(
    ("theirs", "option", "value"),
    [
        ({"sequence_parallel": False}, "enable_sequence_parallel", False),
        ({"defer_fsdp_grad_sync": "all"}, "fsdp_defer_grad_sync", "all"),
        ({"defer_fsdp_grad_sync": True}, "fsdp_defer_grad_sync", "all"),
        ({"defer_fsdp_grad_sync": False}, "fsdp_defer_grad_sync", "nothing"),
        ({"reshard_after_forward": True}, "fsdp_reshard_after_forward", "always"),
        ({"reshard_after_forward": 4}, "fsdp_reshard_after_forward", 4),
        ({"tp_plan": TinyPlan}, "plan", TinyPlan),
        ({"activation_checkpointing": True}, "activation_checkpoint", AC(mode="full")),
        ({"activation_checkpointing": False}, "activation_checkpoint", AC()),
    ],
)
def test_names_and_bools_of_automodel_are_accepted(theirs, option, value):
    assert getattr(FSDP2Config(**theirs), option) == value
    assert getattr(read_strategy({"strategy": "fsdp2", **theirs}), option) == value


def test_an_error_has_the_option_as_an_attribute():
    with pytest.raises(OptionError) as caught:
        FSDP2Config(compile={"enable": 3})
    assert (caught.value.option, caught.value.value) == ("compile.enable", 3)
    assert "section.name = 3: " in str(caught.value.renamed("section.name"))
    with pytest.raises(OptionError, match=r"^enable_sequence_parallel = 3: expected true or false$"):
        FSDP2Config(enable_sequence_parallel=3, plan="\0")


@pytest.mark.parametrize("plan", [TinyPlan, {"embed": torch.distributed.tensor.parallel.ColwiseParallel()}])
def test_plans_that_are_python_objects_can_not_be_written_as_toml(plan):
    config = FSDP2Config(plan=plan)
    assert config.plan == plan
    with pytest.raises(OptionError) as caught:
        config.to_toml()
    assert caught.value.option == "plan"


@pytest.mark.parametrize(
    "source", ["cpu_offload = true", 'strategy = "dpp"', "strategy = 1", "strategy = x", 3]
)
def test_invalid_strategies_are_refused(source):
    with pytest.raises(ConfigError):
        read_strategy(source)


COMPILED, LOSS_ALONE = {"enable": True}, {"enable": True, "components": ["loss"]}


@pytest.mark.parametrize(
    ("cls", "options", "option"),
    [
        (FSDP2Config, {"sequence_paralel": True}, "sequence_paralel"),
        (FSDP2Config, {"compile": {"enabel": True}}, "compile.enabel"),
        (FSDP2Config, {"enable_fsdp2_prefetch": True}, "enable_fsdp2_prefetch"),
        (FSDP2Config, {"tp_plan": "gla", "plan": "gla"}, "plan"),
        # a bool is valid only under Automodel's name of this option
        (
            FSDP2Config,
            {"fsdp_defer_grad_sync": True},
            "fsdp_defer_grad_sync",
        ),
        (FSDP2Config, {"enable_cpu_offload": 1}, "enable_cpu_offload"),
        *((FSDP2Config, {"fsdp_reshard_after_forward": bad}, "fsdp_reshard_after_forward") for bad in (True, "x", 0)),
        (FSDP2Config, {"fsdp_forward_prefetch": -1}, "fsdp_forward_prefetch"),
        (FSDP2Config, {"fsdp_backward_prefetch": 2, "fsdp_reshard_after_forward": "never"}, "fsdp_backward_prefetch"),
        (FSDP2Config, {"pin_cpu_memory": True}, "pin_cpu_memory"),
        (FSDP2Config, {"mixed_precision_param": "float16"}, "mixed_precision_param"),
        (FSDP2Config, {"mixed_precision_cast_inputs": True}, "mixed_precision_cast_inputs"),
        (FSDP2Config, {"compile": 3}, "compile"),
        (FSDP2Config, {"compile": AC()}, "compile"),
        (FSDP2Config, {"autocast_dtype": "float32", "mixed_precision_param": "bfloat16"}, "autocast_dtype"),
        (
            FSDP2Config,
            {"compile": COMPILED, "enable_async_tensor_parallel": True, "enable_sequence_parallel": False},
            "enable_async_tensor_parallel",
        ),
        (FSDP2Config, {"compile": LOSS_ALONE, "enable_async_tensor_parallel": True}, "enable_async_tensor_parallel"),
        (FSDP2Config, {"activation_checkpoint": {"mode": "memory_budget"}}, "activation_checkpoint.mode"),
        (FSDP2Config, {"activation_checkpoint": {"mode": "keep_mixer"}, "compile": COMPILED}, "activation_checkpoint.mode"),
        (FSDP2Config, {"compile": {"backend": "eager"}}, "compile.backend"),
        (AC, {"mode": "full", "per_op_sac_matmuls": "all"}, "activation_checkpoint.per_op_sac_matmuls"),
        (AC, {"preserve_rng_state": False}, "activation_checkpoint.preserve_rng_state"),
        (AC, {"mode": "selective", "selective_ac_option": "0"}, "activation_checkpoint.selective_ac_option"),
        (AC, {"mode": "memory_budget", "memory_budget": 2}, "activation_checkpoint.memory_budget"),
        (AC, {"scope": "audio"}, "activation_checkpoint.scope"),
        *((Compile, {"enable": True, "components": bad}, "compile.components") for bad in (["modle"], [], ["loss"] * 2)),
        (Compile, {"enable": True, "mode": "fast"}, "compile.mode"),
        *((DDPConfig, {"bucket_cap_mb": bad}, "bucket_cap_mb") for bad in (0, 1e-9, float("inf"))),
        (DDPConfig, {"static_graph": True, "find_unused_parameters": True}, "static_graph"),
        (DDPConfig, {"static_graph": True}, "static_graph"),
        (DDPConfig, {"split_compiled_blocks": True, "bucket_cap_mb": 0.5, "compile": COMPILED}, "bucket_cap_mb"),
        (DDPConfig, {"split_compiled_blocks": True}, "split_compiled_blocks"),
        (DDPConfig, {"enable_async_tensor_parallel": True}, "enable_async_tensor_parallel"),
        *((MegatronFSDPConfig, {"zero_dp_strategy": bad}, "zero_dp_strategy") for bad in ("3", 7, True)),
        (MegatronFSDPConfig, {"fsdp_unit_modules": []}, "fsdp_unit_modules"),
        (MegatronFSDPConfig, {"options": {"nccl_ub": [True]}}, "options"),
    ],
)  # fmt: skip
def test_an_option_is_refused_by_its_name(cls, options, option):
    with pytest.raises(OptionError) as caught:
        cls(**options)
    assert caught.value.option == option
    assert "\n" not in str(caught.value)
