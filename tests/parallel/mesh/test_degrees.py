"""Degrees: inference, refusals, and the arithmetic in their messages."""

import math
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.refusals import refusal
from titanplans.errors import ParallelError
from titanplans.parallel.mesh.degrees import refuse_degrees
from titanplans.plan.degrees import Degrees

NAMES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
degree = st.integers(1, 8)


@given(st.lists(degree, min_size=5, max_size=5), st.sampled_from(NAMES))
def test_one_degree_is_inferred_from_the_others(sizes, free):
    degrees = dict(zip(NAMES, sizes, strict=True))
    world = math.prod(sizes)
    assert Degrees(**degrees | {free: -1}).resolve(world) == Degrees(**degrees)
    assert Degrees(**degrees).resolve(world) == Degrees(**degrees)


@given(st.lists(degree, min_size=5, max_size=5), st.integers(1, 200))
def test_the_remedy_of_an_error_works(sizes, world):
    degrees = Degrees(**dict(zip(NAMES, sizes, strict=True)))
    if math.prod(sizes) == world:
        return
    message = refusal(degrees.resolve, world, kind=ParallelError)
    for name, size in re.findall(r"set (\w+) to (\d+)", message):
        Degrees(**vars(degrees) | {name: int(size)}).resolve(world)
    (processes,) = re.findall(r"start (\d+) process", message)
    degrees.resolve(int(processes))


@given(st.integers(2, 64), st.integers(1, 200))
def test_an_impossible_inference_names_world_sizes_that_work(tp, world):
    if world % tp == 0:
        return
    with pytest.raises(ParallelError, match=f"tp {tp} x pp 1 = {tp}") as error:
        Degrees(tp=tp).resolve(world)
    sizes = re.findall(r"start (\d+)(?: or (\d+))?", str(error.value))[0]
    for size in filter(None, sizes):
        Degrees(tp=tp).resolve(int(size))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -2, 2.0, "2", True, None])
def test_values_that_are_no_degree_are_refused(name, value):
    with pytest.raises(ParallelError, match=rf"^{name} = {re.escape(repr(value))}: a degree is"):
        Degrees(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 2.0])
def test_the_expert_degree_is_not_inferred(value):
    assert "ep" not in Degrees(ep=2).as_sizes()
    with pytest.raises(ParallelError, match=rf"^ep = {value}: a degree is"):
        Degrees(ep=value)


def test_only_one_degree_is_inferred():
    with pytest.raises(ParallelError, match=r"dp_shard and tp are -1"):
        Degrees(tp=-1)


def test_the_arithmetic_is_in_the_message():
    assert refusal(Degrees(dp_replicate=1, dp_shard=2, tp=2).resolve, 8, kind=ParallelError) == (
        "dp_replicate 1 x dp_shard 2 x cp 1 x tp 2 x pp 1 = 4, but there are 8 processes: "
        "set dp_shard to 4, or set tp to 4, or start 4 processes"
    )


def test_the_outermost_axis_comes_first():
    sizes = Degrees(dp_replicate=2, dp_shard=3, cp=4, tp=5, pp=6).as_sizes()
    assert list(sizes.items()) == [("pp", 6), ("dp_replicate", 2), ("dp_shard", 3), ("cp", 4), ("tp", 5)]


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (Degrees(pp=4), "pipeline_parallel_degree = 4"),
        (SimpleNamespace(cp=1, pp=2, ep=8), "pipeline_parallel_degree = 2"),
    ],
)
def test_degrees_that_are_not_implemented_are_refused(degrees, message):
    for ddp in (False, True):
        with pytest.raises(ParallelError, match=message):
            refuse_degrees(degrees, ddp=ddp)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            dict(dp_shard=4, tp=2, ep=3),
            "ep = 3 .* = 4 x 1 x 2 and a multiple of tp = 2: 1, 2, 4 or 8 would work",
        ),
        (dict(dp_shard=4, ep=8), "ep = 8 .* 1, 2 or 4 would work"),
        (dict(dp_shard=2, tp=4, ep=2), "ep = 2 .* 1, 4 or 8 would work"),
    ],
)
def test_expert_degrees_that_do_not_fit_are_refused(degrees, message):
    with pytest.raises(ParallelError, match=message):
        Degrees(**degrees).refuse_experts()


@pytest.mark.parametrize("degrees", [dict(dp_shard=4, tp=2, ep=ep) for ep in (1, 2, 4, 8)])
def test_expert_degrees_that_fit(degrees):
    Degrees(**degrees).refuse_experts()


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (Degrees(dp_replicate=2, dp_shard=1, ep=2), "ddp with ep = 2"),
        (Degrees(dp_replicate=2, dp_shard=1, tp=2), "ddp with tp = 2"),
        (Degrees(dp_shard=4), "set dp_shard to 1 and dp_replicate to 4"),
    ],
)
def test_degrees_that_split_the_model_are_refused_by_ddp(degrees, message):
    refuse_degrees(degrees)
    with pytest.raises(ParallelError, match=message):
        refuse_degrees(degrees, ddp=True)


def test_implemented_degrees_are_accepted():
    refuse_degrees(Degrees(dp_replicate=2, tp=8))
    refuse_degrees(Degrees(dp_replicate=4, cp=2, dp_shard=1), ddp=True)
