"""Proofs of pipelines: correct ones pass, and an engine that splits, sends or sums wrongly is rejected."""

import pytest
from torch import nn

from tests import zoo
from tests.support.plan_proofs import QUICK
from tests.support.releases import needs_torch_2_13
from titanplans import Degrees, PlanError, TPPlan, registered_plans, verify
from titanplans.proof.compare import pipeline
from titanplans.split.stages.shared import SharedParameters
from titanplans.split.stages.stage import Stage
from titanplans.split.stages.trace import Trace

FOUR = dict(num_hidden_layers=4)
TIED = dict(tie_word_embeddings=True)


def proved(name, *degrees, conditions="plain", **fields):
    return verify(lambda: zoo.build(name, **fields), degrees=degrees, conditions=conditions)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "degrees", "fields"),
    [
        ("gla", Degrees(tp=2, pp=4), FOUR),  # every block is a stage
        ("rwkv7", Degrees(tp=2, cp=2, pp=2), FOUR),  # the first block's values are sent to all other stages
        ("llama", Degrees(pp=3), TIED | FOUR),  # stages of one and two blocks
        ("mixtral", Degrees(tp=2, ep=2, pp=2), dict(output_router_logits=False)),
        ("yoco", Degrees(cp=2, pp=2), {}),
        ("gemma3", Degrees(tp=2, pp=2), {}),  # the tower is on both stages
    ],
)
def test_stages_train_as_the_unsplit_model_does(name, degrees, fields):
    report = proved(name, degrees, conditions="each", **fields)
    assert report.passed, report.table()
    assert {case.options.degrees for case in report.cases} == {degrees}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in (*zoo.ARCHITECTURES, *zoo.FAMILIES) if name != "tiny"])
def test_every_architecture_is_proved_in_two_stages(name):
    """Two schedules are used, with two ranks for each stage. `titanplans verify --all` proves all conditions of each."""
    fields = {"nsa": dict(num_hidden_layers=2)}.get(name, {})  # its tiny config has one block

    def build():
        model = zoo.build(name, **fields)
        if hasattr(model.config, "output_router_logits"):
            model.config.output_router_logits = False  # refused
        return model

    conditions = "each" if name in (*zoo.ARCHITECTURES, *QUICK) else "plain"
    report = verify(build, degrees=[Degrees(tp=2, pp=2)], conditions=conditions)
    assert report.passed, report.table()


@pytest.mark.thorough
def test_a_pipeline_without_tp_is_proved_in_every_pair_of_conditions():
    report = proved("llama", Degrees(pp=2), conditions="pairs", **TIED)
    assert report.passed, report.table()
    scenarios = [case.scenario for case in report.cases]
    assert {scenario.dtype for scenario in scenarios} == {"float64", "float32", "bfloat16"}
    assert {scenario.fused for scenario in scenarios} == {
        True,
        False,
    }  # 1F1B, and a schedule that splits the backward
    assert any(check.what == "tied" for case in report.cases for check in case.checks)


def test_stages_are_proved_by_default_if_there_are_two_blocks():
    report = verify(lambda: zoo.build("gla"), conditions="plain")
    assert Degrees(tp=2, pp=2) in {case.options.degrees for case in report.cases}
    assert {case["pp"] for case in report.to_dict()["cases"]} == {1, 2}
    alone = verify(lambda: zoo.build("gla", num_hidden_layers=1), conditions="plain")
    assert {case.options.degrees.pp for case in alone.cases} == {1}


@pytest.mark.parametrize(
    ("name", "pp", "message"),
    [
        ("gla", 3, "pp = 3: GLAForCausalLM has 2 blocks, and each stage needs one: 2 stages at most"),
        ("mixtral", 2, "pp = 2: output_router_logits = True: "),
    ],
)
def test_impossible_stages_are_refused(name, pp, message):
    fields = dict(output_router_logits=True) if name == "mixtral" else {}
    with pytest.raises(PlanError, match=message):
        proved(name, Degrees(tp=2, pp=pp), **fields)


def patch(monkeypatch, owner, name, change):
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))


WRONG = {
    "a gradient of a tied weight that is not summed": (
        "llama", SharedParameters, "sum_gradients", lambda right: lambda self: None, "gradients model.embed_tokens.weight",
    ),
    "a gradient that is not sent back": (
        "gla", Stage, "run", lambda right: lambda self, xs, forward: right(self, [x.detach() for x in xs], forward),
        "gradients model.embeddings.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pipeline_is_rejected(name, monkeypatch):
    model, owner, attribute, change, check = WRONG[name]
    patch(monkeypatch, owner, attribute, change)
    (case,) = proved(model, Degrees(pp=2), **(TIED if model == "llama" else FOUR)).cases
    assert not case.passed
    assert case.worst.startswith(check), case.worst


REFUSED = {
    "a value besides the stream that is not sent": (
        "rwkv7", Trace, "crossing", lambda right: lambda self, at: right(self, at)[-1:],
    ),
    "a stage that computes with other inputs": (
        "gla", Stage, "run", lambda right: lambda self, received, forward: right(self, [0 * x for x in received], forward),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_stage_that_computes_something_else_is_refused(name, monkeypatch):
    model, owner, attribute, change = REFUSED[name]
    patch(monkeypatch, owner, attribute, change)
    with pytest.raises(PlanError, match=r"model.layers.2 gets other arguments than in the unsplit model"):
        proved(model, Degrees(pp=2), **FOUR)


class Unsummed(registered_plans()["qwen3"]):
    def attn_plan(self, attn):
        return {**super().attn_plan(attn), "q_norm": self.replicated_off_stream()}


@pytest.mark.parametrize("conditions", ["plain", "each"])
def test_a_wrong_plan_is_rejected_at_its_module(conditions):
    report = verify(
        lambda: zoo.build("qwen3"), Unsummed, degrees=[Degrees(tp=2, pp=2)], conditions=conditions
    )
    for case in report.cases:
        assert case.finding.first.name == "model.layers.1.self_attn.q_norm.weight", report.table()


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        return self.down_proj(self.up_proj(x).relu())


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Plain(nn.Module):
    """A model outside transformers, whose head is defined before its embedding."""

    def __init__(self, tied, width=16):
        super().__init__()
        self.lm_head, self.embed = nn.Linear(width, 32, bias=False), nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        if tied:
            self.embed.weight = self.lm_head.weight

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class WithACache(Plain):
    def forward(self, input_ids, use_cache=True):
        assert not use_cache
        return super().forward(input_ids)


class PlainPlan(TPPlan):
    def mlp_plan(self, mlp):
        return {
            **self.mlp_region(),
            "up_proj": self.colwise(),
            "down_proj": self.rowwise(reduce_output=False),
        }


@pytest.mark.parametrize("model", [Plain, WithACache])
@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_module_is_proved_in_stages(model, tied):
    report = verify(lambda: model(tied), PlainPlan, degrees=[Degrees(tp=2, pp=2)], conditions="each")
    assert report.passed, report.table()


@needs_torch_2_13("backwards are not split before it")
@pytest.mark.parametrize("lost", ["a backward", "the gradient of a micro batch"])
def test_a_schedule_that_loses_gradients_is_rejected(lost, monkeypatch):
    if lost == "a backward":
        patch(monkeypatch, pipeline, "merge_orders", lambda right: lambda orders: right(orders)[:-1])
    else:
        patch(monkeypatch, pipeline, "backward_of_weights", lambda right: lambda weights, left: None)
    report = proved("llama", Degrees(pp=2), conditions="each", **FOUR)
    assert not report.passed
    assert any(case.worst.startswith("gradients") for case in report.cases)
