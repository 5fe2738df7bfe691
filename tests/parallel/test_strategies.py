"""Strategies: every option is documented, checked when made, and reads back from a dict and from TOML."""

import ast
import inspect
import itertools
import textwrap
import types
from dataclasses import FrozenInstanceError, fields
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import Tiny, TinyPlan

from titanplans.parallel import ParallelError
from titanplans.parallel.activation_checkpoint import EveryNthLayer, Full, MemoryBudget, MLPOnly
from titanplans.parallel.activation_checkpoint.keep_mixer import KeepMixer
from titanplans.parallel.activation_checkpoint.selective import Selective
from titanplans.parallel.compile import COMPONENTS
from titanplans.parallel.fsdp import shard
from titanplans.parallel.strategies import (
    ActivationCheckpointing,
    Compile,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MixedPrecision,
    read_strategy,
    write_strategy,
)
from titanplans.parallel.strategies.options import Options
from titanplans.parallel.strategies.sections import _READ

STRATEGIES = [FSDP2Config, DDPConfig, MegatronFSDPConfig]
SECTIONS = [MixedPrecision, ActivationCheckpointing, Compile]
SIXTEEN = [
    "megatron_fsdp_unit_modules",
    "zero_dp_strategy",
    "init_fsdp_with_meta_device",
    "grad_reduce_in_fp32",
    "preserve_fp32_weights",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "check_for_nan_in_grad",
    "report_nan_in_param_grad",
    "average_in_collective",
    "disable_bucketing",
    "calculate_per_token_loss",
    "keep_fp8_transpose_cache",
    "nccl_ub",
    "fsdp_double_buffer",
    "activation_checkpointing",
]


def refusal(fn, *args, **kwargs):
    with pytest.raises(ParallelError) as caught:
        fn(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- round trips


def values(hint):
    """Any value of the type that has a form in TOML."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values(a) for a in arguments if a is type(None) or written(a)))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(), values(arguments[1]), max_size=3)
    if hint is type(None):
        return st.none()
    if issubclass(hint, Options):
        return options(hint)
    return {
        bool: st.booleans(),
        int: st.integers(0, 5),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(),
    }[hint]


def written(hint):
    return get_origin(hint) is not type and hint.__module__ != "torch.distributed.tensor.parallel.style"


@st.composite
def options(draw, cls):
    """Options of which a few are given: any more exclude each other too often."""
    hints, names = get_type_hints(cls), [item.name for item in fields(cls)]
    given_values = {}
    if cls is ActivationCheckpointing:
        given_values["mode"] = draw(st.sampled_from(list(_READ)))
        names = list(_READ[given_values["mode"]]) or ["scope"]
    if cls is Compile:
        given_values["enable"] = True
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        given_values[name] = draw(values(hints[name]))
    try:
        return cls(**given_values)
    except ParallelError:
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
    for item in fields(cls):
        if type(None) in get_args(get_type_hints(cls)[item.name]):
            assert item.default is None, item.name
    assert cls.from_toml("") == cls()


@pytest.mark.parametrize("cls", [*STRATEGIES, *SECTIONS])
def test_every_option_is_documented_below_it(cls):
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    documented = {
        statement.target.id
        for statement, below in itertools.pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr)
    }
    assert documented == {item.name for item in fields(cls)}


def test_options_are_frozen_and_nested_ones_may_be_tables():
    config = FSDP2Config(
        mixed_precision={"param_dtype": "bfloat16"}, compile={"enable": True, "components": ["loss"]}
    )
    assert config.mixed_precision == MixedPrecision(param_dtype="bfloat16")
    assert config.compile.components == ("loss",)
    with pytest.raises(FrozenInstanceError):
        config.cpu_offload = True
    assert DDPConfig(bucket_cap_mb=4) == DDPConfig(bucket_cap_mb=4.0)


def test_plans_of_python_have_no_form_in_toml():
    for plan in (TinyPlan, {"embed": torch.distributed.tensor.parallel.ColwiseParallel()}):
        config = FSDP2Config(tp_plan=plan)
        assert config.tp_plan == plan
        assert "fsdp2.tp_plan" in refusal(config.to_toml)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: FSDP2Config.from_dict({"sequence_paralel": True}),
            "fsdp2.sequence_paralel: no such option; did you mean sequence_parallel?",
        ),
        (
            lambda: FSDP2Config.from_dict({"compile": {"enabled": True}}),
            "compile.enabled: no such option; did you mean enable?",
        ),
        (lambda: FSDP2Config.from_toml("cpu_offload = yes"), "fsdp2, line 1, column 15"),
        (
            lambda: read_strategy("cpu_offload = true"),
            "strategy is missing: set it to one of fsdp2, ddp, megatron_fsdp",
        ),
        (lambda: read_strategy('strategy = "dpp"'), "strategy = 'dpp': no such strategy; did you mean ddp?"),
        (lambda: read_strategy("strategy = 1"), "strategy = 1: no such strategy"),
        (lambda: FSDP2Config(cpu_offload=1), "fsdp2.cpu_offload = 1: expected true or false"),
        (lambda: FSDP2Config(reshard_after_forward=True), "fsdp2.reshard_after_forward = true"),
        (
            lambda: FSDP2Config(reshard_after_forward="sometimes"),
            "'default', 'always', 'never' or a whole number",
        ),
        (lambda: FSDP2Config(reshard_after_forward=0), "reshard_after_forward = 0"),
        (lambda: FSDP2Config(forward_prefetch=-1), "forward_prefetch = -1"),
        (
            lambda: FSDP2Config(backward_prefetch=2, reshard_after_forward="never"),
            "reshard_after_forward = 'never'",
        ),
        (lambda: FSDP2Config(pin_memory=True), "pin_memory = true: nothing is offloaded: set cpu_offload"),
        (
            lambda: FSDP2Config(mixed_precision={"param_dtype": "float16"}),
            "mixed_precision.param_dtype = 'float16'",
        ),
        (lambda: FSDP2Config(mixed_precision={"cast_forward_inputs": True}), "Set param_dtype"),
        (lambda: FSDP2Config(mixed_precision=3), "expected a table, or MixedPrecision(...)"),
        (
            lambda: FSDP2Config(autocast_dtype="float32", mixed_precision={"param_dtype": "bfloat16"}),
            "mixed_precision.param_dtype = 'bfloat16'",
        ),
        (
            lambda: FSDP2Config(
                compile={"enable": True, "enable_async_tensor_parallel": True}, sequence_parallel=False
            ),
            "set sequence_parallel to true",
        ),
        (
            lambda: FSDP2Config(activation_checkpointing={"mode": "memory_budget"}),
            "set compile.enable to true",
        ),
        (
            lambda: FSDP2Config(activation_checkpointing={"mode": "keep_mixer"}, compile={"enable": True}),
            "set compile.enable to false",
        ),
        (
            lambda: ActivationCheckpointing(mode="full", every_nth=3),
            'every_nth = 3: mode = "full" does not read it: leave it out, or take every_nth',
        ),
        (lambda: ActivationCheckpointing(preserve_rng_state=False), 'mode = "none" does not read it'),
        (lambda: ActivationCheckpointing(mode="every_nth", every_nth=0), "every_nth = 0"),
        (lambda: ActivationCheckpointing(mode="memory_budget", memory_budget=2), "memory_budget = 2.0"),
        (lambda: ActivationCheckpointing(scope="audio"), "'all', 'language', 'vision'"),
        (lambda: Compile(backend="eager"), "compile.backend = 'eager': nothing is compiled"),
        (lambda: Compile(enable=True, components=["modle"]), "'model', 'loss', 'optimizer'"),
        (lambda: Compile(enable=True, components=[]), "compiles nothing"),
        (lambda: Compile(enable=True, mode="fast"), "compile.mode = 'fast'"),
        (
            lambda: Compile(enable=True, components=["loss"], enable_async_tensor_parallel=True),
            "needs compiled blocks",
        ),
        (lambda: DDPConfig(bucket_cap_mb=0), "bucket_cap_mb = 0.0"),
        (lambda: DDPConfig(bucket_cap_mb=float("inf")), "expected a finite number"),
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
            lambda: DDPConfig(compile={"enable": True, "enable_async_tensor_parallel": True}),
            "take FSDP2Config",
        ),
        (lambda: MegatronFSDPConfig(zero_dp_strategy="3"), "expected one of 0, 1, 2, 3"),
        (lambda: MegatronFSDPConfig(zero_dp_strategy=7), "expected one of 0, 1, 2, 3"),
        (
            lambda: MegatronFSDPConfig(zero_dp_strategy=0, init_fsdp_with_meta_device=True),
            "zero_dp_strategy = 0",
        ),
        (lambda: MegatronFSDPConfig(overlap_grad_reduce=False), "zero_dp_strategy = 3"),
        (lambda: MegatronFSDPConfig(overlap_param_gather=False), "zero_dp_strategy = 3"),
        (lambda: MegatronFSDPConfig(overlap_grad_reduce=False, zero_dp_strategy=2), "zero_dp_strategy = 2"),
        (lambda: MegatronFSDPConfig(average_in_collective=True), "set one of the two to false"),
        (lambda: MegatronFSDPConfig(disable_bucketing=True), "changes nothing"),
        (lambda: MegatronFSDPConfig(nccl_ub=True), "set fsdp_double_buffer to true"),
        (lambda: MegatronFSDPConfig(activation_checkpointing=True), "take FSDP2Config"),
        (lambda: MegatronFSDPConfig(megatron_fsdp_unit_modules=[]), "names no class"),
    ],
)
def test_values_are_refused_with_the_reason_and_the_remedy(make, words):
    assert words in refusal(make)


# ---------------------------------------------------------------- what is handed on


def test_fsdp2_reaches_shard():
    parameters = inspect.signature(shard).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert FSDP2Config().shard_options() == keywords  # every argument, and the same defaults
    given_options = FSDP2Config(
        mixed_precision={
            "param_dtype": "bfloat16",
            "reduce_dtype": "float32",
            "output_dtype": "float32",
            "cast_forward_inputs": True,
        },
        cpu_offload=True,
        pin_memory=False,
        reshard_after_forward=2,
        forward_prefetch=1,
        backward_prefetch=2,
        towers="root",
        symmetric_memory=True,
    ).shard_options()
    assert not [name for name, default in keywords.items() if given_options[name] == default]
    assert given_options["param_dtype"] is torch.bfloat16


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, None),
        ({"mode": "full", "early_stop": True}, Full(early_stop=True)),
        (
            {"mode": "selective", "matmuls": "all", "scope": "language"},
            Selective(matmuls="all", scope="language"),
        ),
        ({"mode": "every_nth", "every_nth": 3}, EveryNthLayer(3)),
        ({"mode": "mlp"}, MLPOnly()),
        ({"mode": "keep_mixer", "preserve_rng_state": False}, KeepMixer(preserve_rng_state=False)),
        ({"mode": "memory_budget", "memory_budget": 0.25}, MemoryBudget(0.25)),
    ],
)
def test_activation_checkpointing_builds_its_policy(config, policy):
    made = ActivationCheckpointing(**config).policy()
    assert made == policy
    assert type(made) is type(policy)
    if policy is not None and config["mode"] not in ("memory_budget", "every_nth"):
        made.apply(Tiny())


@pytest.mark.parametrize("mode", [mode for mode in _READ if mode != "none"])
def test_each_mode_reads_all_that_its_policy_takes(mode):
    names = {item.name for item in fields(ActivationCheckpointing(mode=mode).policy())}
    renamed = {"n": "every_nth", "budget": "memory_budget"}
    assert {renamed.get(name, name) for name in names} == set(_READ[mode])
    assert ActivationCheckpointing(mode=mode).policy() == type(ActivationCheckpointing(mode=mode).policy())(
        **({"n": 2} if mode == "every_nth" else {})
    )  # the same defaults


def test_compile_names_the_components_there_are():
    assert set(get_args(get_args(get_type_hints(Compile)["components"])[0])) == set(COMPONENTS)


def test_megatron_fsdp_has_the_sixteen():
    assert [item.name for item in fields(MegatronFSDPConfig)] == SIXTEEN
