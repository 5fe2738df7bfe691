"""QLoRA: frozen weights in NF4 have torchao's codes, are proved under plans, and are refused if a shard divides a block."""

import functools

import pytest
import torch
from torch import nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from tests import zoo
from tests.support import step_comparison
from tests.support.plain_proofs import verify_plain
from titanplans import Degrees, PlanError, check_plan, modeling
from titanplans.errors import OptionError
from titanplans.modeling.samples import build_real
from titanplans.parallel import LoRA, add_adapters
from titanplans.precision.nf4 import CODES, LEVELS, SCALES, dequantise, quantise, quantised
from titanplans.proof.batches.sample import randomise

QLORA = LoRA(rank=4, quantize_base="nf4")


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def test_codes_are_those_of_torchao():
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    codes, scales = quantise(weight)
    theirs = to_nf4(weight, 64, 256)
    # torchao's table has only four digits
    torch.testing.assert_close(theirs.nf4, torch.tensor(LEVELS), rtol=0, atol=1e-4)
    # titanplans rounds the scales to bfloat16 before it looks up the codes.
    assert (theirs.quantized_data.view(-1) == codes.view(-1)).float().mean() > 0.98
    ours = dequantise(codes, scales, torch.float32)
    error, of_torchao = ((w - weight).abs().mean() for w in (ours, theirs.get_original_weight()))
    assert error < 1.01 * of_torchao
    assert codes.nbytes + scales.nbytes == weight.numel() * 4.25 / 8
    again = quantise(ours)
    assert torch.equal(dequantise(*again, torch.float32), ours)
    zeros = dequantise(*quantise(torch.zeros(2, 64)), torch.float32)
    assert not zeros.any()


def model_of(name, **fields):
    model = build_real(zoo.config(name, num_hidden_layers=1, **fields))
    add_adapters(model, QLORA)
    return model


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "qwen3",
            dict(num_key_value_heads=2, hidden_size=64, head_dim=32, intermediate_size=256),
        ),  # shared heads
        # packed projections, whose codes an all-to-all exchanges
        (
            "phi3",
            dict(hidden_size=256, intermediate_size=256),
        ),
    ],
)
def test_weights_in_nf4_are_proved_on_plans(name, fields):
    report = verify_plain(functools.partial(model_of, name, **fields), degrees=[4], loss_parallel=True)
    assert report.passed, report.table()


def test_initial_values_are_those_of_the_quantised_model():
    config = zoo.config("qwen3", num_hidden_layers=1, intermediate_size=64)
    full_precision, small = modeling.build(config), modeling.build(config)
    adapted = add_adapters(small, QLORA)
    assert adapted.frozen == sum(param.numel() for param in full_precision.parameters())
    for model in (full_precision, small):
        model.to_empty(device="cpu")
        modeling.initialize(model, seed=3)
    assert quantised(small)
    for name, module in quantised(small).items():
        codes, scales = quantise(full_precision.get_parameter(f"{name}.weight"))
        assert torch.equal(module._parameters[CODES], codes), name
        assert torch.equal(module._parameters[SCALES], scales), name


def test_a_shard_that_divides_a_block_is_refused():
    model = modeling.build(zoo.config("qwen3", num_hidden_layers=1, intermediate_size=192))
    add_adapters(model, QLORA)
    with pytest.raises(PlanError, match=r"down_proj.*\[64, 192\] is in NF4.*\[64, 96\].* 3"):
        check_plan(model, Degrees(tp=2))
    model = modeling.build(zoo.config("qwen3", num_hidden_layers=1, intermediate_size=48))
    with pytest.raises(OptionError, match=r"down_proj .*\(64, 48\), whose inputs are not a multiple of 64"):
        add_adapters(model, QLORA)
    model = modeling.build(zoo.config("gpt2"))
    with pytest.raises(OptionError, match=r"is a Conv1D, .*in NF4"):
        add_adapters(model, QLORA)
    with pytest.raises(OptionError, match=r"has no effect unless lora\.rank"):
        LoRA(quantize_base="nf4")


def build(kind: str) -> nn.Module:
    fields = dict(num_key_value_heads=2, head_dim=32, intermediate_size=256, num_hidden_layers=1)
    model = zoo.build("qwen3", dtype=torch.float32, **fields)
    add_adapters(model, QLORA)
    weights = {name: param.detach().clone() for name, param in model.named_parameters() if "nf4" in name}
    randomise(model, 0)
    for (
        name,
        weight,
    ) in weights.items():  # keep the initial scales: a real model never has random scales
        model.get_parameter(name).data.copy_(weight)
    return model


CASES = {
    ("nf4", 2): {},
    ("nf4", 2, "recomputed"): {
        "activation_checkpoint": {"mode": "full"},
        "fsdp_reshard_after_forward": "always",
    },
    ("nf4", 4, "compiled"): {"compile": {"enable": True, "backend": "aot_eager"}},
}


@pytest.mark.thorough
def test_a_step_equals_that_of_one_process():
    cases = step_comparison.cases_of(CASES, build, step_comparison.by_torchtitan, vocabulary=96)
    assert not step_comparison.equals_one_process(cases, ranks=4)
