"""Wrong plans, and wrong exchanges of tokens, under context parallelism: `verify` rejects each and names the module."""

import copy
from itertools import chain

import pytest

from tests import zoo
from tests.support.mutants.bugs import changed
from tests.support.plain_proofs import verify_sharded
from titanplans import Degrees, registered_plans
from titanplans.errors import PlanError
from titanplans.split.collectives import gather_replicated
from titanplans.split.local_tokens import LocalTokens

PLANS = registered_plans()


def proved(name, plan, degree=1, context=2, **fields):
    """Return the report of one plain training of the model `name` under `plan`."""
    degrees = [Degrees(tp=degree, cp=context)]
    return verify_sharded(lambda: zoo.build(name, **fields).double(), plan, degrees=degrees, seq_len=8)


def test_the_correct_plans_are_proved():
    for name in ("olmo2", "mixtral", "rwkv6"):
        assert proved(name, PLANS[name]).passed, name


def without(name, member, value):
    """Return the plan of `name` with the attribute or method `member` replaced by `value`."""
    return type("Without", (PLANS[name],), {member: value})


def other_order(plan, style):
    return plan.packed(*style.sections[1:], style.sections[0])


WRONG = {
    "a section of other rows": (
        (
            "phi3",
            changed(PLANS["phi3"], qkv_proj=other_order),
            dict(num_attention_heads=8, num_key_value_heads=4),
        ),
        "model.layers.0.self_attn.o_proj",
        "check the sections of qkv_proj (32 + 32 + 64) against the order in which the code splits them",
    ),
    "sections of a convolution": (
        ("mamba2", changed(PLANS["mamba2"], conv1d=other_order), {}),
        "backbone.layers.0.mixer.norm",
        "check the sections of in_proj (128 + 128 + 8 + 8 + 8) and of conv1d (8 + 8 + 128) against the order",
    ),
    "a norm whose statistic is not shared": (
        ("olmo2", changed(PLANS["olmo2"], q_norm=lambda plan, style: plan.colwise()), {}),
        "model.layers.0.self_attn.q_norm",
        "correct nearby: model.layers.0.self_attn.q_proj",
    ),
    "a balance that each rank counts by itself": (
        ("mixtral", without("mixtral", "model_functions", lambda self, model: {}), {}),
        "gradient of the output of model.layers.1.mlp.gate",  # not the experts, whose tokens each rank sorts
        "the model adds a loss to the cross entropy, and model_functions of Without is empty, so each rank may add "
        "the full loss: return {name of the function that computes it: self.count_once} from model_functions",
    ),
    "a count of all heads": (
        ("mamba2", without("mamba2", "local_attributes", lambda self, attn: {}), {}),
        "runs in backbone.layers.0.mixer after backbone.layers.0.mixer.in_proj",
        "set its counts in local_attributes or mlp_attributes",
    ),
}
"""By fault: the model, the plan and the config fields; the module that the report names; a fragment of the advice."""


NOT_SPLIT = changed(PLANS["llama"], q_proj=lambda plan, style: plan.replicated_in_region())


def test_a_projection_that_is_not_split_by_weights_is_rejected_inside_its_mixer():
    (case,) = proved("llama", NOT_SPLIT, 2, 1).cases
    assert "runs in model.layers.0.self_attn" in (
        case.worst if case.finding is None else case.finding.first.name
    )
    assert "colwise() " in " ".join(chain(map(str, filter(None, [case.finding])), case.notes))


@pytest.mark.parametrize("degrees", [(1, 2), (2, 2)], ids=["cp", "tp x cp"])
def test_a_projection_that_is_not_exchanged_is_refused_where_its_code_needs_all_tokens(degrees):
    with pytest.raises(
        PlanError,
        match=r"^view in modeling_llama.py, line \d+, .* output of \S+q_proj, .*as colwise\(\), or ",
    ):
        proved("llama", NOT_SPLIT, *degrees)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (2, 2)], ids=["tp", "cp", "tp x cp"])
@pytest.mark.parametrize("name", WRONG)
def test_a_fault_is_rejected_with_its_module_and_advice(name, degrees):
    (model, plan, fields), module, advice = WRONG[name]
    report = proved(model, plan, *degrees, **fields)
    (case,) = report.cases
    assert not case.passed
    assert module in (case.worst if case.finding is None else case.finding.first.name), report.table()
    assert advice in " ".join(chain(map(str, filter(None, [case.finding])), case.notes))


@pytest.mark.parametrize("fault", ["gradients are not summed", "all ranks take the first shard"])
def test_an_exchange_that_loses_gradients_or_tokens_is_rejected(fault, monkeypatch):
    if fault == "gradients are not summed":
        # A rank keeps only the gradient that its own computation gives to its tokens.
        monkeypatch.setattr(LocalTokens, "gather", _collected)
    else:
        monkeypatch.setattr(LocalTokens, "take_local", _of_first_rank)
    assert not proved("rwkv6", PLANS["rwkv6"]).passed


def _collected(tokens, x):
    return gather_replicated(x, tokens.dim, x.shape[tokens.dim] * tokens.ranks, tokens.rank, tokens.group)


def _of_first_rank(tokens, x, dim=None, take_local=LocalTokens.take_local):
    first = copy.copy(tokens)
    first.rank = 0
    return take_local(first, x, dim)
