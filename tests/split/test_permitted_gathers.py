"""A plan permits the gathers of tokens that its model's code needs under context parallelism, and no others."""

import re

import pytest
import torch
from titanplans.plans.fla.gla import GLAPlan

from tests import zoo
from titanplans import Degrees, TPOptions, apply_plan, check_plan, kernels, modeling
from titanplans.errors import PlanError
from titanplans.modeling.samples import build_real, sample_inputs
from titanplans.proof.batches.conditions import MicroBatch
from titanplans.proof.batches.sample import Sampler
from titanplans.proof.ranks import threads
from titanplans.split.local_tokens import GatherPermission

CONTEXT = 2
UNPADDED = ("cat", "path_attn")
"""Models whose code refuses padding."""
EMBED_ALL = ("gpt2", "gemma3")
"""Models whose code uses the embeddings of all tokens outside of any region."""

CASES = [(name, zoo.fields(name)) for name in zoo.ARCHITECTURES]
CASES += [(name, fields) for name, variants in zoo.FAMILIES.items() for fields in variants]

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def by_block(key: str) -> str:
    """Return a plan key without the index of its block."""
    return re.sub(r"\.\d+\.", ".*.", key)


def run(world, name, fields, plan=None):
    """Run forwards on a rank that has half of the tokens; return the styles."""
    config = modeling.load_config(name, "debug", **fields)
    model = build_real(config, dtype=torch.float32).train()
    applied = apply_plan(model, world.mesh_of(CONTEXT), plan=plan)

    def inputs(batch_size, seq_len, seed):
        return sample_inputs(config, batch_size=batch_size, seq_len=seq_len, seed=seed)

    sampler = Sampler(model, inputs, 1, 0)
    for index, padding in enumerate([""] if name in UNPADDED else ["", "left"]):
        model(**sampler.tokens(MicroBatch(length=16, padding=padding), index))
    return applied.styles


@pytest.fixture
def requested(monkeypatch):
    """Return a set that fills with the keys at which code asks for tokens of other ranks."""
    keys = set()
    check = GatherPermission.check

    def noted(self, name):
        keys.add(by_block(self.key))
        check(self, name)

    monkeypatch.setattr(GatherPermission, "check", noted)
    return keys


@pytest.mark.parametrize(("name", "fields"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_plan_permits_what_its_code_asks_for_and_no_more(name, fields, requested):
    kernels.install("cpu")
    styles = threads.run(CONTEXT, torch.device("cpu"), lambda world: run(world, name, fields))
    assert requested == {by_block(key) for key, style in styles.items() if style.may_gather}
    assert any(getattr(style, "all_tokens", False) for style in styles.values()) == (name in EMBED_ALL)


@pytest.mark.parametrize("name", EMBED_ALL)
def test_code_that_needs_all_embeddings_is_refused_without_them(name):
    class OwnTokens(zoo.plan(name)):
        def vocab_embedding(self, *, all_tokens=False, **options):
            return super().vocab_embedding(**options)

    with pytest.raises(PlanError, match=r"needs all tokens .* the style vocab_embedding\(all_tokens=True\)"):
        threads.run(CONTEXT, torch.device("cpu"), lambda world: run(world, name, zoo.fields(name), OwnTokens))


@pytest.mark.parametrize("entry", ["attn_region", "attn_region(may_gather=True)"])
def test_a_plan_as_a_dict_permits_gathers_as_the_error_says(entry):
    model = zoo.build("gla", dtype=torch.float32)
    plan = GLAPlan(TPOptions(Degrees(cp=CONTEXT))).full_plan(model)
    plan |= {key: entry for key, style in plan.items() if style.may_gather}
    if entry.endswith("(may_gather=True)"):
        threads.run(CONTEXT, torch.device("cpu"), lambda world: run(world, "gla", zoo.fields("gla"), plan))
    else:  # the layer removes padding
        with pytest.raises(PlanError, match=r"model.layers.0.attn the style attn_region\(may_gather=True\)"):
            threads.run(
                CONTEXT, torch.device("cpu"), lambda world: run(world, "gla", zoo.fields("gla"), plan)
            )


@pytest.mark.parametrize("method", ["attn_input", "attn_region", "shared_region"])
def test_what_the_error_advises_works(method):
    plan = GLAPlan(TPOptions(Degrees(cp=CONTEXT)))
    assert not getattr(plan, method)()[""].may_gather
    assert getattr(plan, method)(may_gather=True)[""].may_gather


def test_an_embedding_of_all_tokens_that_begins_the_stream_is_refused():
    class Both(zoo.plan("gpt2")):
        def vocab_embedding(self, *, all_tokens=False, **options):
            return super().vocab_embedding(begins_stream=True, all_tokens=all_tokens)

    with pytest.raises(
        PlanError, match=r"wte.*begins_stream = True .*, all_tokens = True keeps all: choose one"
    ):
        check_plan(zoo.build("gpt2"), Degrees(cp=CONTEXT), plan=Both)
