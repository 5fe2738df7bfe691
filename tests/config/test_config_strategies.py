"""Strategies: every option is documented, checked when made, and reads back from a dict and from TOML."""

import types
from dataclasses import FrozenInstanceError
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import TinyPlan

from titanplans.config import (
    ActivationCheckpoint,
    Compile,
    DDPConfig,
    Float8,
    FSDP2Config,
    MegatronFSDPConfig,
    read_strategy,
    write_strategy,
)
from titanplans.config.options import options_of
from titanplans.config.values import in_toml, is_options
from titanplans.errors import OptionError, UserError

STRATEGIES = [FSDP2Config, DDPConfig, MegatronFSDPConfig]
SECTIONS = [ActivationCheckpoint, Compile, Float8]


def refusal(fn, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        fn(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- round trips


def values(hint):
    """Any value of the type that has a form in TOML."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values(a) for a in arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(), values(arguments[1]), max_size=3)
    if hint is type(None):
        return st.none()
    if origin is Annotated:
        base = st.sampled_from(["op", "1", "12"]) if arguments[0] is str else values(arguments[0])
        return base.filter(lambda value: all(rule.holds(value) for rule in arguments[1:]))
    if is_options(hint):
        return options(hint)
    return {
        bool: st.booleans(),
        int: st.integers(0, 5),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(),
    }[hint]


@st.composite
def options(draw, cls):
    """Options of which a few are given: any more exclude each other too often."""
    hints = {field.name: in_toml(field.hint) for field in options_of(cls)}
    names = list(hints)
    given_values = {}
    if cls is ActivationCheckpoint:
        given_values["mode"] = draw(st.sampled_from(["none", "full", "selective", "mlp", "memory_budget"]))
        given_values["selective_ac_option"] = draw(st.sampled_from(["2", "op"]))
    if cls is Compile:
        given_values["enable"] = True
    if cls is Float8:
        given_values["recipe_name"] = "tensorwise"
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        given_values[name] = draw(values(hints[name]))
    try:
        return cls(**given_values)
    except OptionError:
        assume(False)


@pytest.mark.parametrize("cls", [*STRATEGIES, *SECTIONS])
def test_round_trip_through_dict_and_toml(cls):
    @given(options(cls))
    def check(made):
        assert cls.from_dict(made.to_dict()) == made
        assert cls.from_toml(made.to_toml()) == made
        if cls in STRATEGIES:
            assert read_strategy(write_strategy(made)) == made
            assert read_strategy({"strategy": cls.title, **made.to_dict()}) == made

    check()


@pytest.mark.parametrize("cls", [*STRATEGIES, *SECTIONS])
def test_what_toml_can_leave_out_is_the_default(cls):
    """None has no word in TOML, so it may be no more than a default."""
    for field in options_of(cls):
        if type(None) in get_args(field.hint):
            assert field.default is None, field.name
    assert cls.from_toml("") == cls()


@pytest.mark.parametrize("cls", [*STRATEGIES, *SECTIONS])
def test_every_option_is_documented_below_it(cls):
    assert all(field.doc for field in options_of(cls))


def test_options_are_frozen_and_nested_ones_may_be_tables():
    config = FSDP2Config(compile={"enable": True, "components": ["loss"]})
    assert config.compile == Compile(enable=True, components=("loss",))
    with pytest.raises(FrozenInstanceError):
        config.enable_cpu_offload = True
    assert DDPConfig(bucket_cap_mb=4) == DDPConfig(bucket_cap_mb=4.0)


def test_automodels_names_and_its_bool():
    assert FSDP2Config(activation_checkpointing=True).activation_checkpoint.mode == "full"
    assert FSDP2Config(activation_checkpointing=False) == FSDP2Config()
    assert not FSDP2Config(sequence_parallel=False).enable_sequence_parallel
    assert FSDP2Config(defer_fsdp_grad_sync="all").fsdp_defer_grad_sync == "all"
    assert FSDP2Config(defer_fsdp_grad_sync=True).fsdp_defer_grad_sync == "all"
    assert FSDP2Config(defer_fsdp_grad_sync=False).fsdp_defer_grad_sync == "nothing"
    assert FSDP2Config(reshard_after_forward=True).fsdp_reshard_after_forward == "always"
    assert (
        read_strategy('strategy = "fsdp2"\nreshard_after_forward = false').fsdp_reshard_after_forward
        == "never"
    )
    assert FSDP2Config(reshard_after_forward=4).fsdp_reshard_after_forward == 4
    # By today's name only today's words.
    assert "fsdp_defer_grad_sync = true: expected one of" in refusal(FSDP2Config, fsdp_defer_grad_sync=True)
    assert FSDP2Config(tp_plan=TinyPlan).plan is TinyPlan
    assert "is the same option" in refusal(FSDP2Config, tp_plan="gla", plan="gla")


def test_an_error_has_the_option_as_a_field():
    with pytest.raises(OptionError) as caught:
        FSDP2Config(compile={"enable": 3})
    assert (caught.value.option, caught.value.value) == ("compile.enable", 3)
    assert "section.name = 3: " in str(caught.value.renamed("section.name"))


def test_plans_of_python_have_no_form_in_toml():
    for plan in (TinyPlan, {"embed": torch.distributed.tensor.parallel.ColwiseParallel()}):
        config = FSDP2Config(plan=plan)
        assert config.plan == plan
        assert refusal(config.to_toml).startswith("plan = ")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: FSDP2Config.from_dict({"sequence_paralel": True}),
            "sequence_paralel = true: no such option; did you mean enable_sequence_parallel?",
        ),
        (
            lambda: FSDP2Config.from_dict({"compile": {"enabel": True}}),
            "compile.enabel = true: no such option; did you mean enable?",
        ),
        (
            lambda: FSDP2Config(enable_fsdp2_prefetch=True),
            "enable_fsdp2_prefetch = true: no such option; the depths say it: fsdp_forward_prefetch and",
        ),
        (lambda: FSDP2Config.from_toml("enable_cpu_offload = yes"), "FSDP2Config, line 1, column 22"),
        (
            lambda: read_strategy("cpu_offload = true"),
            "strategy is missing: set it to one of fsdp2, ddp, megatron_fsdp",
        ),
        (lambda: read_strategy('strategy = "dpp"'), "strategy = 'dpp': no such strategy; did you mean ddp?"),
        (lambda: read_strategy("strategy = 1"), "strategy = 1: no such strategy"),
        (lambda: FSDP2Config(enable_cpu_offload=1), "enable_cpu_offload = 1: expected true or false"),
        (lambda: FSDP2Config(fsdp_reshard_after_forward=True), "fsdp_reshard_after_forward = true"),
        (
            lambda: FSDP2Config(fsdp_reshard_after_forward="sometimes"),
            'one of "default", "always", "never" or an integer, at least 1',
        ),
        (lambda: FSDP2Config(fsdp_reshard_after_forward=0), "reshard_after_forward = 0"),
        (lambda: FSDP2Config(fsdp_forward_prefetch=-1), "forward_prefetch = -1"),
        (
            lambda: FSDP2Config(fsdp_backward_prefetch=2, fsdp_reshard_after_forward="never"),
            "fsdp_reshard_after_forward = 'never'",
        ),
        (
            lambda: FSDP2Config(pin_cpu_memory=True),
            "pin_cpu_memory = true: it does nothing with enable_cpu_offload = false: set that to true",
        ),
        (
            lambda: FSDP2Config(mixed_precision_param="float16"),
            'mixed_precision_param = "float16"',
        ),
        (
            lambda: FSDP2Config(mixed_precision_cast_inputs=True),
            "it does nothing with mixed_precision_param = unset",
        ),
        (lambda: FSDP2Config(compile=3), "expected a table, or Compile(...)"),
        (
            lambda: FSDP2Config(autocast_dtype="float32", mixed_precision_param="bfloat16"),
            'mixed_precision_param = "bfloat16"',
        ),
        (
            lambda: FSDP2Config(
                compile={"enable": True}, enable_async_tensor_parallel=True, enable_sequence_parallel=False
            ),
            "it needs enable_sequence_parallel = true",
        ),
        (
            lambda: FSDP2Config(activation_checkpoint={"mode": "memory_budget"}),
            "set compile.enable to true",
        ),
        (
            lambda: FSDP2Config(activation_checkpoint={"mode": "keep_mixer"}, compile={"enable": True}),
            "set compile.enable to false",
        ),
        (
            lambda: ActivationCheckpoint(mode="full", per_op_sac_matmuls="all"),
            'per_op_sac_matmuls = "all": it does nothing with mode = "full": set that to "selective", or leave this out',
        ),
        (lambda: ActivationCheckpoint(preserve_rng_state=False), 'it does nothing with mode = "none"'),
        (
            lambda: ActivationCheckpoint(mode="selective", selective_ac_option="0"),
            'selective_ac_option = "0"',
        ),
        (
            lambda: ActivationCheckpoint(mode="memory_budget", memory_budget=2),
            "memory_budget = 2: expected a number, from",
        ),
        (lambda: ActivationCheckpoint(scope="audio"), '"all", "language", "vision"'),
        (
            lambda: FSDP2Config(compile={"backend": "eager"}),
            'compile.backend = "eager": it does nothing with',
        ),
        (lambda: Compile(enable=True, components=["modle"]), '"model", "loss", "optimizer"'),
        (lambda: Compile(enable=True, components=[]), "nothing is compiled so"),
        (lambda: Compile(enable=True, mode="fast"), 'compile.mode = "fast"'),
        (
            lambda: FSDP2Config(
                compile={"enable": True, "components": ["loss"]}, enable_async_tensor_parallel=True
            ),
            'it needs compile.enable = true with "model" in compile.components',
        ),
        (lambda: DDPConfig(bucket_cap_mb=0), "bucket_cap_mb = 0: expected a number, above 0"),
        (lambda: DDPConfig(bucket_cap_mb=float("inf")), "expected a number"),
        (
            lambda: DDPConfig(static_graph=True, find_unused_parameters=True),
            "set find_unused_parameters to false",
        ),
        (lambda: DDPConfig(static_graph=True), "set defer_grad_sync to false"),
        (
            lambda: DDPConfig(split_compiled_blocks=True, bucket_cap_mb=0.5, compile={"enable": True}),
            "split_compiled_blocks needs at least 1",
        ),
        (lambda: DDPConfig(split_compiled_blocks=True), "no block is compiled"),
        (
            lambda: DDPConfig(compile={"enable": True}, enable_async_tensor_parallel=True),
            "enable_async_tensor_parallel = true: no such option",
        ),
        (lambda: MegatronFSDPConfig(zero_dp_strategy="3"), "expected one of 0, 1, 2, 3"),
        (lambda: MegatronFSDPConfig(zero_dp_strategy=7), "expected one of 0, 1, 2, 3"),
        (lambda: MegatronFSDPConfig(fsdp_unit_modules=[]), "expected a list of strings, at least one"),
        (
            lambda: MegatronFSDPConfig(options={"nccl_ub": [True]}),
            "expected a table, each value true or false or",
        ),
    ],
)
def test_values_are_refused_with_the_reason_and_the_remedy(make, words):
    assert words in refusal(make)
