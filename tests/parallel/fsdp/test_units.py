"""FSDP modules of models and of random trees: each parameter is in exactly one FSDP module, and each FSDP module reduces
in one dtype."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import zoo
from tests.support.tiny_model import Tiny
from titanplans import modeling
from titanplans.parallel import FSDP2Config, ParallelError
from titanplans.parallel.fsdp import shard
from titanplans.parallel.fsdp.dtypes import split_dtypes
from titanplans.parallel.fsdp.units import find_units, managed
from titanplans.proof.ranks.fake import fake_ranks


class Node(nn.Module):
    """A module with parameters, and children, some of them in a container that is never called."""

    def forward(self, x):
        return x


def node(parameters, children, contained):
    module = Node()
    for index, (dtype, trains) in enumerate(parameters):
        value = torch.empty(index + 1, 2, dtype=dtype, device="meta")
        module.register_parameter(f"p{index}", nn.Parameter(value, requires_grad=trains))
    for index, child in enumerate(children):
        module.add_module(f"c{index}", child)
    if contained:
        module.add_module("list", nn.ModuleList(contained))
    return module


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
# Trainable parameters of a module have one dtype; another test has those that are refused.
parameters = st.builds(
    lambda dtype, trains: [(dtype if each else torch.float16, each) for each in trains],
    dtypes,
    st.lists(st.booleans(), max_size=3),
)
trees = st.recursive(
    st.builds(node, parameters, st.just([]), st.just([])),
    lambda inner: st.builds(node, parameters, st.lists(inner, max_size=3), st.lists(inner, max_size=2)),
    max_leaves=8,
)


@st.composite
def models(draw):
    model = Node()
    model.embed = nn.Embedding(4, 2, device="meta")
    model.layers = nn.ModuleList(draw(st.lists(trees, min_size=1, max_size=3)))
    model.norm = nn.LayerNorm(2, device="meta")
    model.lm_head = nn.Linear(2, 4, bias=False, device="meta")
    model.rest = draw(trees)
    if draw(st.booleans()):
        model.lm_head.weight = model.embed.weight
    return model


def flat(fsdp_modules):
    return [module for fsdp_module in fsdp_modules for module in (fsdp_module, *fsdp_module.inner)]


@settings(max_examples=200, deadline=None)
@given(models())
def test_every_parameter_is_in_one_fsdp_module(model):
    fsdp_modules = split_dtypes(model, find_units(model))
    counts = Counter(
        id(param)
        for fsdp_module in flat(fsdp_modules)
        for param in {id(p): p for p in managed(model, fsdp_module, fsdp_modules).values()}.values()
    )
    assert counts == Counter({id(param): 1 for param in model.parameters()})


@settings(max_examples=200, deadline=None)
@given(models())
def test_an_fsdp_module_reduces_in_one_dtype(model):
    fsdp_modules = split_dtypes(model, find_units(model))
    for fsdp_module in flat(fsdp_modules):
        assert (
            len({p.dtype for p in managed(model, fsdp_module, fsdp_modules).values() if p.requires_grad}) <= 1
        ), fsdp_module


@settings(max_examples=100, deadline=None)
@given(models(), st.data())
def test_a_weight_of_two_blocks_is_refused_or_in_one_fsdp_module(model, data):
    every = [name for name, _ in model.named_parameters() if name.startswith(("layers", "rest"))]
    first, second = (data.draw(st.sampled_from(every or ["embed.weight"])) for _ in range(2))
    owner, _, name = second.rpartition(".")
    setattr(model.get_submodule(owner), name, model.get_parameter(first))
    refusal = ""
    try:
        fsdp_modules = split_dtypes(model, find_units(model))
    except ParallelError as error:
        refusal = str(error)
    if refusal:
        assert "one parameter in two FSDP units" in refusal or "one dtype" in refusal
        return
    tied = model.get_parameter(first)
    assert (
        sum(
            any(p is tied for p in managed(model, fsdp_module, fsdp_modules).values())
            for fsdp_module in flat(fsdp_modules)
        )
        == 1
    )


def test_resharding_to_some_ranks_is_refused_with_another_parallelism():
    with (
        fake_ranks(8, cp=4) as mesh,
        pytest.raises(ParallelError, match="covers all 8, and here it covers 4"),
    ):
        shard(Tiny(), mesh["cp"], FSDP2Config(fsdp_reshard_after_forward=2))


def test_fsdp_modules_of_a_vision_language_model():
    model = modeling.build(zoo.config("gemma3", num_hidden_layers=3, vision_config=dict(num_hidden_layers=2)))
    fsdp_modules = [
        (fsdp_module.role, str(fsdp_module), fsdp_module.last)
        for fsdp_module in split_dtypes(model, find_units(model))
    ]
    language = "model.language_model"
    assert fsdp_modules == [
        ("root", "the root", False),
        *[("tower", f"model.vision_tower.encoder.layers.{i}", False) for i in range(2)],
        ("ends", f"{language}.embed_tokens + {language}.norm + lm_head", False),
        *[("block", f"{language}.layers.{i}", i == 2) for i in range(3)],
    ]
    assert [fsdp_module.role for fsdp_module in find_units(model, "root")] == ["root", "ends", *["block"] * 3]


def test_an_embedding_tied_to_a_parameter_of_the_root_stays_in_the_root():
    model = Tiny()
    model.score = nn.Linear(16, 32, bias=False)
    model.score.weight = model.embed.weight
    assert [fsdp_module.role for fsdp_module in find_units(model)] == ["root", "block", "block", "ends"]
