"""`verify` on wrong plans: each is rejected, and the module of the fault is named."""

import pytest
import torch
from torch import nn

from tests.support.faulty_styles import Unsummed, hooked, installed, leaving, tiny_plan_with
from tests.support.mutants.bugs import loss_over_ranks
from tests.support.plain_proofs import verify_plain, verify_sharded
from tests.support.tiny_model import Block, Tiny, TinyPlan
from titanplans.split.module_weight import add_deferred_bias
from titanplans.styles.region import Region


def doubled(style):
    def install(original, module, border):
        module._parameters["weight"].register_hook(lambda grad: grad * 2)

    return installed(style, install)


class DoublingPlan(TinyPlan):
    def layer_plan(self, layer):
        return super().layer_plan(layer) | {"mlp_norm": doubled(self.replicated_on_stream())}


def rolled(plan):
    """Shift the shards by one row."""
    return hooked(plan.colwise(), lambda output: output.roll(1, -1))


def detached(plan):
    def install(original, module, border):
        weight = module._parameters["weight"]
        module.register_forward_pre_hook(lambda *_: module.__dict__.update(read=weight.to_local().detach()))
        module.forward = lambda x: nn.functional.rms_norm(x, x.shape[-1:], module.read)

    return installed(plan.replicated_in_region(), install)


def differing(plan):
    def install(original, module, border):
        with torch.no_grad():
            module._parameters["weight"].to_local().mul_(1 + 1e-9 * border.rank)

    return installed(plan.replicated_in_region(), install)


class ScalingPlan(TinyPlan):
    """Divides the gradient at the head by the number of ranks, as a divided loss would."""

    def vocab_head(self):
        return loss_over_ranks(super().vocab_head())


def gradient_left(plan):
    """Enter a region without summing the gradients of its input."""
    return installed(Region(reduce_output=False), lambda right, module, border: None)


def sum_left(plan):
    """Leave a region without the sum."""
    return leaving(plan.rowwise(), lambda border, module, output: add_deferred_bias(module, output))


class UntyingPlan(TinyPlan):
    def vocab_head(self):
        def install(original, module, border):
            original(module, border)
            module.register_forward_pre_hook(untie)

        def untie(module, args):
            module._parameters["weight"] = nn.Parameter(module._parameters["weight"].detach().clone())

        return installed(super().vocab_head(), install)


class PostBlock(Block):
    def __init__(self):
        super().__init__()
        self.attn.post_norm = nn.RMSNorm(16)

    def forward(self, x):
        x = x + self.attn.post_norm(self.attn(hidden_states=self.attn_norm(x)))
        return x + self.mlp(self.mlp_norm(x))


class PostNormed(Tiny):
    """A mixer with a norm after its rowwise projection; the norm is therefore on the residual stream."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(PostBlock() for _ in range(2))


def tied():
    return Tiny(tied=True)


# Model, plan, sequence_parallel; direction, name and reason of the finding. In the backward the fault of the last layer
# shows first.
WRONG = {
    "gradient not summed": (
        Tiny, tiny_plan_with(q_norm=lambda p: Unsummed()), True,
        "backward", "layers.1.attn.q_norm.weight", "not summed over the ranks",
    ),
    "gradient doubled": (
        Tiny, DoublingPlan, True,
        "backward", "layers.1.mlp_norm.weight", "exactly 2 times the right one",
    ),
    "replicated after the sum": (
        PostNormed, tiny_plan_with(post_norm=lambda p: p.replicated_in_region()), False,
        "backward", "layers.1.attn.post_norm.weight", "exactly 4 times too large: once for each rank",
    ),
    "head shifted": (Tiny, tiny_plan_with(k_proj=rolled), True, "forward", "layers.0.attn.k_proj", ""),
    "replicas differ": (Tiny, tiny_plan_with(q_norm=differing), True, "forward", "layers.0.attn.q_norm", ""),
    "loss divided": (
        Tiny, ScalingPlan, True,
        "backward", "lm_head.weight", "exactly 1/4 of the right one: divided by the number of ranks",
    ),
    "input's gradient not summed": (
        Tiny, tiny_plan_with(**{"": gradient_left}), False,
        "backward", "gradient of the output of layers.1.attn_norm", "not summed over the ranks",
    ),
    "output not summed": (
        Tiny, tiny_plan_with(o_proj=sum_left), False,
        "forward", "layers.0.attn.o_proj", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_rejected_with_its_module_and_a_reason(name):
    model_fn, plan, sequence, direction, name_of_finding, reason = WRONG[name]
    report = verify_sharded(model_fn, plan, degrees=[4], sequence_parallel=sequence)
    assert not report.passed
    (case,) = report.cases
    assert (
        max(check.error for check in case.checks) > 1e5 * case.checks[0].tolerance
        or name == "replicas differ"
    )
    finding = case.finding
    assert (finding.direction, finding.first.name) == (direction, name_of_finding)
    assert reason in finding.reason
    assert bool(finding.reason) == bool(reason)
    assert finding.correct
    assert all(point.error < case.checks[0].tolerance for point in finding.correct)
    assert name_of_finding in report.table()


class OnStream(TinyPlan):
    def layer_plan(self, layer):
        return super().layer_plan(layer) | {"mlp_norm": self.replicated_off_stream()}


@pytest.mark.parametrize(
    ("model_fn", "plan", "module", "style"),
    [
        (
            Tiny,
            tiny_plan_with(q_norm=lambda p: p.replicated_off_stream()),
            "attn.q_norm",
            "replicated_in_region()",
        ),
        (Tiny, OnStream, "mlp_norm", "replicated_on_stream()"),
        (
            PostNormed,
            tiny_plan_with(post_norm=lambda p: p.replicated_off_stream()),
            "attn.post_norm",
            "replicated_on_stream()",
        ),
    ],
)
def test_the_style_that_sums_a_gradient_is_named(model_fn, plan, module, style):
    """With the style that the report names, the plan is right, because it has no other fault."""
    (case,) = verify_sharded(model_fn, plan).cases
    assert case.finding.first.name == f"layers.1.{module}.weight"
    assert f"not summed over the ranks; {style} sums it;" in str(case.finding)


@pytest.mark.parametrize(
    ("plan", "module"),
    [
        (tiny_plan_with(v_proj=rolled), "layers.0.attn.v_proj"),
        (DoublingPlan, "layers.1.mlp_norm.weight"),
    ],
    ids=["forward", "backward"],
)
def test_the_module_is_named_for_a_sequence_of_one_token(plan, module):
    """The first rank has the token, the others have padding."""
    (case,) = verify_sharded(Tiny, plan, seq_len=1).cases
    assert case.finding.first.name == module


def test_replicated_after_the_sum_is_right_on_a_sharded_sequence():
    """Under context parallelism each rank has other tokens, so this gradient is Partial, and "replicated after the sum" is
    correct."""
    plan = tiny_plan_with(post_norm=lambda p: p.replicated_in_region())
    report = verify_plain(PostNormed, plan, degrees=[2], loss_parallel=True)
    assert [case.passed for case in report.cases] == [True, False]
    right = tiny_plan_with(post_norm=lambda p: p.replicated_on_stream())
    assert verify_plain(PostNormed, right, degrees=[2], loss_parallel=True).passed


def test_a_row_has_the_errors_of_its_own_training():
    """Errors are in epsilons of the case's own precision, although the module is located by a plain step in float64."""
    plan = tiny_plan_with(q_norm=lambda p: p.replicated_off_stream())
    report = verify_sharded(Tiny, plan, conditions="pairs")
    worst = {}
    for case in report.cases:
        assert case.finding.first.name == "layers.1.attn.q_norm.weight"
        errors = {check.what: check.error for check in case.checks}
        what = "replicas" if case.scenario.dtype == "bfloat16" else "gradients"
        worst.setdefault(case.scenario.dtype, []).append(errors[what])
    assert 1e6 * max(worst["float32"]) < min(worst["float64"])
    assert max(worst["bfloat16"]) < 1e4 < min(worst["float32"])


def test_a_missing_gradient_is_rejected():
    report = verify_sharded(Tiny, tiny_plan_with(q_norm=detached))
    (case,) = report.cases
    assert case.missing == ("layers.0.attn.q_norm.weight", "layers.1.attn.q_norm.weight")
    assert not case.passed
    text = report.table()
    assert "missing" in text
    assert "layers.0.attn.q_norm.weight: no gradient, but the unsplit model has one" in text


def test_an_additional_gradient_is_rejected():
    def thawing(plan):
        def install(original, module, border):
            module._parameters["weight"].requires_grad_(True)

        return installed(plan.replicated_in_region(), install)

    def frozen():
        model = Tiny()
        model.layers[0].attn.q_norm.weight.requires_grad_(False)
        return model

    plan = tiny_plan_with(q_norm=thawing)
    report = verify_sharded(frozen, plan)
    assert report.cases[0].unexpected == ("layers.0.attn.q_norm.weight",)
    assert not report.passed
    assert "a gradient, but the unsplit model has none" in report.table()


def test_untied_weights_are_rejected():
    report = verify_sharded(tied, UntyingPlan)
    (case,) = report.cases
    assert not case.checks[-1].passed
    assert "embed.weight and lm_head.weight: no longer one tensor" in report.table()


def test_a_plan_that_does_not_run_is_rejected():
    plan = tiny_plan_with(q_proj=lambda p: p.rowwise(), o_proj=lambda p: p.colwise())
    report = verify_sharded(Tiny, plan)
    assert not report.passed
    assert report.cases[0].checks[0].what == "runs"
    assert report.cases[0].checks[0].where == "in layers.0.attn.q_proj"
    assert "does not run, in layers.0.attn.q_proj: RuntimeError: " in report.table()
    assert "; colwise() is for a projection that gets the full input" in report.table()
    report.to_dict()


def test_a_finding_that_cases_share_is_printed_once():
    report = verify_plain(Tiny, tiny_plan_with(q_norm=lambda p: Unsummed()), degrees=[2])
    assert len(report.cases) == 4
    text = report.table()
    assert text.count("first wrong at") == 1
    assert "4 of 4 cases WRONG" in text


class Meddling(TinyPlan):
    """A plan that changes what the module computes, instead of only how it is split."""

    def mlp_plan(self, mlp):
        mlp.up_proj.bias = None
        return super().mlp_plan(mlp)


def test_a_plan_that_changes_the_model_is_compared_with_the_unchanged_model():
    report = verify_sharded(Tiny, Meddling)
    assert not report.passed


class ForgettingPadding(TinyPlan):
    def vocab_embedding(self, *, begins_stream=False):
        def forget(original, module, border):
            original(module, border)
            module.padding_idx = None

        return installed(super().vocab_embedding(begins_stream=begins_stream), forget)


@pytest.mark.parametrize("padding", [0, 7, 31])
def test_a_gradient_of_the_padding_embedding_is_rejected(padding):
    def build():
        torch.manual_seed(0)
        model = Tiny()
        model.embed = nn.Embedding(32, 16, padding_idx=padding)
        return model

    assert verify_sharded(build, TinyPlan, seq_len=6).passed
    report = verify_sharded(build, ForgettingPadding, seq_len=6)
    assert not report.passed
    assert "embed.weight" in report.table()
