"""Plans in float8: faults that a proof rejects, values on one rank, errors, and regions that are entered in float8.

tests/plans/test_proofs.py proves the plans themselves.
"""

from functools import partial

import pytest
import torch
from titanplans.plans.hf.llama import LlamaPlan
from torch import nn
from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

import titanplans.precision.float8.border
import titanplans.precision.float8.linear
from tests import zoo
from tests.support import plan_proofs
from tests.support.releases import needs_torch_2_13
from tests.support.tiny_model import changed
from titanplans import Degrees, PlanError, apply_plan, check_plan, modeling
from titanplans.apply.check import check
from titanplans.kernels.widen import Widen
from titanplans.parallel import Float8, convert_to_float8
from titanplans.plan.options import TPOptions
from titanplans.precision.float8.linear import split_linear
from titanplans.proof.compare.float8 import exact_float8
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.split.converted import RECIPES, float8_linears, recipe_of
from titanplans.split.local_code import HeadRanks
from titanplans.styles.replicated_in_region import ReplicatedInRegion
from titanplans.torch_private.torchao import float8_data

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def convert(model, recipe="tensorwise", **options):
    return convert_to_float8(model, Float8(recipe_name=recipe, **options))


def prove(name, recipe, **options):
    return plan_proofs.float8(name, recipe, sequence=True).prove(**options)


def test_a_cast_gives_the_same_in_forward_and_backward():
    """torchao casts through float32, which a proof replaces by float64 only in forwards. Both casts have to give 36, not
    40."""
    model = nn.Sequential(nn.Linear(16, 16))
    convert(model, emulate=True)
    x, scale = torch.tensor(0.3564357183595591, dtype=torch.float64), torch.tensor(106.611083984375)

    def cast():
        return float8_data(hp_tensor_and_scale_to_float8(x, scale, torch.float8_e4m3fn)).float().item()

    with exact_float8(model, torch.float64):
        with Widen(torch.float64):
            forward = cast()
        assert forward == cast() == 36


# Faults that a proof rejects.


def local_scales(monkeypatch, module=titanplans.precision.float8.linear):
    plain = module.all_reduce
    monkeypatch.setattr(
        module, "all_reduce", lambda x, group, op="sum": x if op == "min" else plain(x, group, op)
    )


local_scale_of_the_shard = partial(local_scales, module=titanplans.precision.float8.border)


def summands_with_local_scales(monkeypatch):
    monkeypatch.setattr(titanplans.precision.float8.linear, "_sum_partial", lambda grad, split: grad)
    monkeypatch.setattr(
        titanplans.precision.float8.linear, "_divide_replicated", lambda result, split: result
    )


@pytest.mark.parametrize("fault", [local_scales, local_scale_of_the_shard, summands_with_local_scales])
def test_local_scales_are_rejected(fault, monkeypatch):
    fault(monkeypatch)
    report = prove("gla", "tensorwise")
    assert not report.passed
    # Neighbouring float8 values differ by 1/16, which is far more than a rounding in float64.
    assert max(check.error for check in report.cases[0].checks) > 1e9


def test_local_scales_of_rows_are_rejected(monkeypatch):
    local_scales(monkeypatch)
    assert not prove("qwen3", "rowwise").passed


# Each rank computes the same values as torchao.

ALONE = ReplicatedInRegion(), HeadRanks(0, 1, ("no group", 1), None, (0,))
"""The style of a Linear and its number of ranks: unsplit, or split over one rank."""


@needs_torch_2_13("products on CPUs have one scale per tensor before it")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("emulate", [True, False])
def test_one_rank_is_bit_identical_to_torchao(recipe, emulate):
    torch.manual_seed(0)
    unsplit = nn.Sequential(nn.Linear(64, 48)).to(torch.bfloat16)
    split = nn.Sequential(nn.Linear(64, 48)).to(torch.bfloat16)
    split.load_state_dict(unsplit.state_dict())
    for model in (unsplit, split):
        convert(model, recipe, emulate=emulate)
    split_linear(split[0], *ALONE)
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16)
    results = []
    for model in (unsplit, split):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        (y * torch.linspace(-1, 1, 48)).sum().backward()
        results.append((y.detach(), leaf.grad, model[0].weight.grad, model[0].bias.grad))
    for ours, torchaos in zip(*results, strict=True):
        assert torch.equal(ours, torchaos)


def test_a_frozen_weight_gets_no_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    convert(model, emulate=True)
    split_linear(model[0], *ALONE)
    model[0].weight.requires_grad_(False)
    x = torch.randn(16, 16, requires_grad=True)
    model(x).sum().backward()
    assert model[0].weight.grad is None
    assert x.grad is not None


# Refusals.


def meta(name, recipe="tensorwise", **overrides):
    with torch.device("meta"):
        model = modeling.build(zoo.config(name, **plan_proofs.FLOAT8[name][0] | overrides))
    convert(model, recipe, emulate=True)
    return model


@pytest.mark.parametrize(
    ("overrides", "degree", "message"),
    [
        ({"intermediate_size": 96}, 4, r"mlp.*96 (outputs|inputs).*(gate|up|down)_proj'\).* to 2 or 3"),
        ({"vocab_size": 144}, 2, r"lm_head \(Float8Linear, 64 in, 144 out\).* 'lm_head'\)$"),
        ({"head_dim": 8, "num_key_value_heads": 4}, 4, r"(k|v)_proj.*32 outputs.*multiples of 16.*to 2$"),
    ],
)
def test_a_shard_that_is_not_aligned_is_refused_with_the_degrees_that_work(overrides, degree, message):
    with pytest.raises(PlanError, match=message):
        check_plan(meta("llama", **overrides), Degrees(tp=degree))


def test_two_recipes_are_refused():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    convert(model, "tensorwise", filter_fqns=["1"], emulate=True)
    rowwise = nn.Sequential(nn.Linear(16, 16))
    convert(rowwise, "rowwise", emulate=True)
    model[1] = rowwise[0]
    with pytest.raises(PlanError, match=r"0 is .*recipe tensorwise, and 1 with rowwise"):
        recipe_of(model)


def test_a_config_of_the_user_is_refused():
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity, convert_to_float8_training

    config = Float8LinearConfig(
        cast_config_input=CastConfig(scaling_granularity=ScalingGranularity.AXISWISE),
        cast_config_weight=CastConfig(scaling_granularity=ScalingGranularity.AXISWISE),
    )
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=config)
    with pytest.raises(PlanError, match="0 \\(Float8Linear\\) has a config"):
        recipe_of(model)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("rowwise", "the recipe is rowwise"), (None, "the module is not converted")],
)
def test_styles_of_torchao_have_to_match_the_recipe(recipe, message):
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel

    theirs = changed(LlamaPlan, mlp=lambda plan: {"gate_proj": Float8ColwiseParallel()})
    model = meta("llama", recipe) if recipe else modeling.build(modeling.load_config("llama", "debug"))
    with pytest.raises(PlanError, match=f"mlp.gate_proj' \\(Float8ColwiseParallel on \\w+\\): .*{message}"):
        check_plan(model, Degrees(tp=2), plan=theirs)
    with pytest.raises(PlanError, match=r"which gloo does not support: use NCCL"):
        check(theirs(TPOptions(Degrees(tp=2), float8="tensorwise")), meta("llama"), backend="gloo")


def test_the_plan_knows_the_recipe():
    recipes = []

    class Asks(LlamaPlan):
        def attn_plan(self, attn):
            recipes.append(self.options.float8)
            return super().attn_plan(attn)

    check_plan(meta("llama", "rowwise"), Degrees(tp=2), plan=Asks)
    assert recipes == ["rowwise"]


def test_a_proof_in_float32_is_refused():
    with pytest.raises(PlanError, match=r"torch\.float32, whose .*float8's steps"):
        prove("llama", "tensorwise", dtype=torch.float32)


def test_a_proof_of_products_that_round_is_refused():
    model = nn.Sequential(nn.Linear(16, 16))
    convert(model)
    with (
        pytest.raises(PlanError, match="convert the model with emulate=True"),
        exact_float8(model, torch.float64),
    ):
        pass


# Which regions are entered and left in float8.


def crossings(name, recipe="tensorwise", plan=None, **changed):
    model = plan_proofs.float8(name, recipe, **changed).build()
    with fake_ranks(2) as mesh:
        by_module = apply_plan(model, mesh, plan=plan).crossings
    return {n.removeprefix("model.layers.0."): dict(crossing) for n, crossing in by_module.items()}


def test_a_region_whose_projections_are_all_float8_is_entered_and_left_in_float8():
    assert crossings("qwen3") == {
        "self_attn": {"activations": None},
        "self_attn.o_proj": {"gradients": None},
        "mlp": {"activations": None},
        "mlp.down_proj": {"gradients": None},
        "lm_head": {"activations": None},
    }
    both = {"activations": None, "gradients": None}
    assert crossings("gla") == {"attn": both, "mlp": both, "lm_head": {"activations": None}}


def test_a_region_not_in_float8_has_a_reason():
    by_module = crossings("gla", unconverted=("gk_proj", "down_proj"))
    why = "model.layers.0.attn.gk_proj.0 is not converted, and uses the input, too"
    assert by_module["attn"] == {"activations": why, "gradients": None}
    why = "model.layers.0.mlp.down_proj is not converted, and computes the output"
    assert by_module["mlp"] == {"activations": None, "gradients": why}
    by_module = crossings("qwen3", "rowwise")
    assert all(
        "rowwise scales the tensors" in why for crossing in by_module.values() for why in crossing.values()
    )
    read_elsewhere = changed(LlamaPlan, lambda plan: plan.attn_input(float8_input=False))
    by_module = crossings("llama", plan=read_elsewhere)
    assert "float8_input = False" in by_module["self_attn"]["activations"]
    assert by_module["mlp"] == {"activations": None}


@pytest.mark.parametrize("name", plan_proofs.FLOAT8)
def test_every_converted_module_is_called(name):
    """No fused kernel bypasses a converted module; for example, `fuse_swiglu` is off if `down_proj` is converted."""
    row, called = plan_proofs.float8(name), set()
    model = row.build()
    for path, module in float8_linears(model).items():
        module.register_forward_pre_hook(lambda module, args, path=path: called.add(path))
    model(**row.inputs(batch_size=1), use_cache=False)
    assert called == float8_linears(model).keys()
