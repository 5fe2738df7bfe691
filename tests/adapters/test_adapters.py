"""LoRA and frozen parameters: proofs of plans, refusals, and training steps over real process groups."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from tests import zoo
from tests.support import process_groups, step_comparison
from tests.support.plain_proofs import verify_plain
from tests.support.refusals import refusal_or_none
from titanplans import Degrees, PlanError, check_plan, modeling
from titanplans.adapters.low_rank import adapted, draw_factor
from titanplans.cli.main import main
from titanplans.errors import OptionError
from titanplans.modeling.samples import build_real
from titanplans.parallel import (
    Float8,
    LoRA,
    ParallelError,
    add_adapters,
    convert_to_float8,
    freeze,
)
from titanplans.proof.batches.sample import randomise
from titanplans.split.adapted import with_factors

SMALL = dict(num_hidden_layers=1, hidden_size=64, intermediate_size=48, vocab_size=96)
EVERY = ("all-linear", "lm_head")


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def model_of(name, options=None, **fields):
    model = build_real(zoo.config(name, **fields))
    add_adapters(model, options or LoRA(rank=4))
    return model


@pytest.mark.parametrize(
    ("name", "fields", "options"),
    [
        # Shared key/value heads, a sharded head, a tied embedding.
        ("qwen3", dict(num_key_value_heads=2, num_hidden_layers=1), LoRA(rank=4, alpha=8, target_modules=EVERY)),
        ("phi3", {}, None),  # packed projections
        ("gpt2", {}, None),  # packed weights in the layout [in, out]
        ("gla", {}, None),  # a replicated Linear in a region, a fused MLP
        ("qwen2_moe", {}, None),  # the gate of a shared expert
        # a sum inside a region
        (
            "mamba",
            {},
            LoRA(rank=3, modules_to_save=("backbone.norm_f", "conv1d")),
        ),
    ],
)  # fmt: skip
def test_adapters_are_proved_on_plans(name, fields, options):
    """The frozen base weights have no gradient. `verify` rejects a plan under which they get a gradient on one rank."""
    report = verify_plain(
        functools.partial(model_of, name, options, **fields), degrees=[4], loss_parallel=True
    )
    assert report.passed, report.table()


def test_float8_bases_are_proved():
    def make():
        model = build_real(zoo.config("llama", num_hidden_layers=1, intermediate_size=64, vocab_size=128))
        convert_to_float8(model, Float8(recipe_name="tensorwise", emulate=True, filter_fqns=("lm_head",)))
        add_adapters(model, LoRA(rank=4, target_modules=("q_proj", "down_proj")))
        return model

    report = verify_plain(make, degrees=[2])
    assert report.passed, report.table()


def test_a_gradient_that_is_not_summed_is_rejected_with_its_module(monkeypatch):
    def unsummed(module, layouts):
        layouts_with_factors = with_factors(module, layouts)
        return layouts_with_factors | {
            name: x._replace(gradient=Replicate())
            for name, x in layouts_with_factors.items()
            if name == "lora_A"
        }

    monkeypatch.setattr("titanplans.styles.base.with_factors", unsummed)
    build = functools.partial(
        model_of, "qwen3", LoRA(rank=4, target_modules=("up_proj",)), num_hidden_layers=1
    )
    report = verify_plain(build, degrees=[2], loss_parallel=True, sequence_parallel=True)
    assert not report.passed
    assert "mlp.up_proj.lora_A" in report.table()
    assert "not summed over the ranks" in report.table()


def test_initial_values_are_those_of_peft_for_any_layout():
    model = model_of("qwen3")
    module = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert not module.lora_B.any()
    bound = module.in_features**-0.5
    assert 0.8 * bound < module.lora_A.abs().max() <= bound
    name = "model.layers.0.self_attn.q_proj.lora_A"
    assert torch.equal(module.lora_A, draw_factor(name, module.lora_A.shape, 0).double())
    meta = modeling.build(zoo.config("qwen3"))
    add_adapters(meta, LoRA(rank=4))
    meta.to_empty(device="cpu")
    modeling.initialize(meta, seed=0)
    assert torch.equal(meta.get_parameter(name), module.lora_A.float())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(target_modules=("wq",)), "'wq' matches no .* q_proj, k_proj"),
        (
            dict(target_modules=("mlp",)),
            r'model.layers.0.mlp is a Qwen3MLP, .*for the Linear modules in it, write "model.layers.0.mlp.\*"',
        ),
        (dict(target_modules=("q_norm",)), "q_norm is a Qwen3RMSNorm, and only Linear"),
        (dict(exclude_modules=("x",)), "lora.exclude_modules = .*'x' matches no Linear module"),
        (dict(target_modules=("q_proj",), exclude_modules=("q_proj",)), "no module is left for an adapter"),
        (dict(modules_to_save=("self_attn",)), "self_attn.q_proj already gets an adapter"),
        (dict(modules_to_save=("wte",)), "'wte' matches no module with parameters"),
    ],
)
def test_names_that_match_nothing_are_refused(options, message):
    model = modeling.build(zoo.config("qwen3"))
    with pytest.raises(OptionError, match=message):
        add_adapters(model, LoRA(rank=4, **options))
    assert not adapted(model)
    assert all(param.requires_grad for param in model.parameters())


def test_modules_that_take_no_adapter_are_refused():
    with pytest.raises(OptionError, match=r"gate_up_proj .* is a parameter of MixtralExperts"):
        add_adapters(modeling.build(zoo.config("mixtral")), LoRA(rank=4, target_modules=("gate_up_proj",)))
    model = model_of("hgrn2")
    with pytest.raises(ParallelError, match=r"o_proj has an adapter, .*uses its weight"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ParallelError, match="adapters already"):
        add_adapters(model, LoRA(rank=4))


@pytest.mark.parametrize("values", [dict(alpha=4.0), dict(dropout=0.1), dict(target_modules=["q_proj"])])
def test_options_without_a_rank_are_refused(values):
    with pytest.raises(OptionError, match=r"has no effect unless lora\.rank"):
        LoRA(**values)


def test_dropout_that_differs_from_the_unsplit_model_is_refused():
    model = model_of("gla", LoRA(rank=4, dropout=0.1))
    with pytest.raises(PlanError, match=r"gk_proj.0.*has a dropout.*lora.exclude_modules"):
        check_plan(model, Degrees(tp=2))
    check_plan(model_of("gla", LoRA(rank=4, dropout=0.1, exclude_modules=("gk_proj.0",))), Degrees(tp=2))


def test_parameters_are_frozen_by_name_and_by_pattern():
    model = modeling.build(zoo.config("llama"))
    freeze(model, ("embed_tokens", "model.layers.0.*", "q_proj.weight"))
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained
    assert not any("embed" in n or "layers.0" in n or "q_proj.weight" in n for n in trained)
    with pytest.raises(ParallelError, match="'wte' matches no module and no parameter"):
        freeze(model, ("wte",))
    with pytest.raises(ParallelError, match="nothing is left to train"):
        freeze(model, ("model", "lm_head"))


def test_verify_takes_adapters_on_the_command_line(capsys):
    arguments = [
        "verify",
        "llama",
        "--tp=2",
        "--quick",
        "--loss-parallel",
        "--sequence-parallel",
        "--vocab-size=64",
    ]
    lora = ["--lora=rank=2", "--lora=target_modules=q_proj,down_proj", "--lora=dropout=0.5"]
    assert main([*arguments, *lora]) == 0
    message = (
        "4 Linear modules have adapters of rank 2 in the unsplit and the split model, with the same masks"
    )
    assert message in capsys.readouterr().out
    for wrong, message in {
        "rank": "--lora rank: write KEY=VALUE",
        "rank=0": "--lora rank 0: expected an integer, at least 1",
        "alpha=2": "has no effect unless lora.rank",
    }.items():
        assert main([*arguments, f"--lora={wrong}"]) == 2
        assert message in capsys.readouterr().err


# Over real process groups, compared with one process.


def build(kind: str) -> nn.Module:
    fields = dict(num_key_value_heads=2, intermediate_size=45, num_hidden_layers=2 if kind == "frozen" else 1)
    model = zoo.build("qwen3", dtype=torch.float32, **fields)
    if kind == "frozen":
        freeze(model, ("embed_tokens", "model.layers.0.*", "q_proj"))
        return model
    dropout = 0.2 if "dropout" in kind else 0.0
    add_adapters(model, LoRA(rank=3, dropout=dropout, modules_to_save=("model.norm",)))
    randomise(model, 0)  # with the initial lora_B, which is zero, the gradient of lora_A would be zero
    torch.manual_seed(1)  # the seed of the dropout
    return model


def split(model: nn.Module, tp: int, **options) -> step_comparison.Parallel:
    torch.manual_seed(1)  # the seed of the dropout
    return step_comparison.by_torchtitan(model, tp, **options)


CASES = {
    ("lora", 2): {},
    ("lora", 2, "recomputed"): {"activation_checkpoint": {"mode": "full"}},
    ("lora", 2, "compiled"): {"compile": {"enable": True, "backend": "aot_eager"}},
    ("lora dropout", 4): {},
    ("lora dropout", 4, "recomputed"): {
        "activation_checkpoint": {"mode": "full"},
        "enable_sequence_parallel": False,
    },
    ("frozen", 2, "always"): {"fsdp_reshard_after_forward": "always"},
}


@pytest.mark.thorough
def test_a_step_equals_that_of_one_process():
    cases = step_comparison.cases_of(CASES, build, split, vocabulary=96)
    assert not step_comparison.equals_one_process(cases, ranks=4)


def _seeds(rank: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    from titanplans import apply_plan

    model = build("lora dropout")
    apply_plan(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    torch.manual_seed(rank)
    return refusal_or_none(model, input_ids=torch.ones(1, 4, dtype=torch.long)) or ""


def test_ranks_that_would_drop_different_elements_are_refused():
    assert "model-parallel rank 1 would draw other numbers" in process_groups.run(_seeds, 2)
