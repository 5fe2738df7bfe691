"""Plans of mixtures of experts: all implementations in transformers, routers and their loss, and wrong plans."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from tests import zoo
from tests.support.plain_proofs import verify_plain
from tests.support.process_groups import run
from titanplans import (
    Degrees,
    PlanError,
    TPOptions,
    apply_plan,
    check_plan,
    kernels,
    modeling,
    registered_plans,
)
from titanplans.apply.check import check
from titanplans.modeling.samples import build_real, sample_inputs
from titanplans.parallel import Float8, convert_to_float8


def config(name, **fields):
    return modeling.load_config(name, "debug", **zoo.FAMILIES[name][0] | fields)


def proved(model_config, plan=None, build=None, **options):
    inputs = sample_inputs(model_config, batch_size=2, seq_len=16, seed=0)
    options = {"degrees": [2], "loss_parallel": True, "sequence_parallel": True} | options
    return verify_plain(build or (lambda: build_real(model_config)), inputs=inputs, plan=plan, **options)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_each_implementation_is_proved(name, implementation):
    """The default of transformers is grouped_mm. gpt-oss has biases, and another order of gate and up."""
    model_config = config(name)
    model_config._experts_implementation = implementation
    # torch has grouped_mm's kernel for float32. It has none for float64, in which all families are proved.
    report = proved(model_config, dtype=torch.float32 if implementation == "grouped_mm" else torch.float64)
    assert report.passed, report.table()


def wrong(name, mlp=None, attn=None, **methods):
    """Return the plan of `name` with styles of its mixtures of experts, or of its mixers, replaced."""

    class Wrong(registered_plans()[name]):
        def mlp_plan(self, module):
            plan = super().mlp_plan(module)
            return plan | (mlp(self) if mlp and hasattr(module, "experts") else {})

        def attn_plan(self, module):
            return super().attn_plan(module) | (attn(self) if attn else {})

    for method, function in methods.items():
        setattr(Wrong, method, function)
    return Wrong


WRONG = {
    "gate and up packed where they alternate": (
        wrong("gpt_oss", lambda plan: {"experts.gate_up_proj": plan.packed(16, 16, dim=2)}), "mlp.experts",
    ),
    "a bias that each rank adds whole": (
        wrong("gpt_oss", lambda plan: {"experts.down_proj_bias": plan.replicated_in_region()}), "mlp",
    ),
    "a router whose gradient is not summed": (
        wrong("qwen3_moe", lambda plan: {"gate": plan.replicated_off_stream()}), "mlp.gate.weight",
    ),
    "a gate whose gradient is not summed": (
        wrong("qwen2_moe", lambda plan: {"shared_expert_gate": plan.replicated_off_stream()}), "mlp.shared_expert_gate",
    ),
    "a balance that each rank counts": (wrong("mixtral", model_functions=lambda self, model: {}), "gate"),
    "a latent whose gradient is not summed": (
        wrong("deepseek_v3", attn=lambda plan: {"kv_a_layernorm": plan.replicated_off_stream()}), "kv_a_layernorm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_rejected_with_its_module(name):
    plan, module = WRONG[name]
    model_type = next(
        name
        for name, plan_class in registered_plans().items()
        if plan_class is plan.__mro__[1] and name in zoo.FAMILIES
    )
    report = proved(config(model_type), plan)
    assert not report.passed
    assert module in report.table(), report.table()


def test_gate_and_up_sharded_as_one_are_refused():
    plan = wrong("mixtral", lambda plan: {"experts.gate_up_proj": plan.colwise(dim=1)})
    with pytest.raises(PlanError, match=r"gate_up_proj.*gate and up .*self\.packed\(48, 48, dim=1\)"):
        proved(config("mixtral"), plan)


def routes(rank):
    """Return each token's experts, on each of two ranks and in the unsplit model."""
    model_config = config("mixtral")
    model = build_real(model_config, dtype=torch.float32)
    tokens = sample_inputs(model_config, batch_size=2, seq_len=16, seed=0)["input_ids"]
    routed = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: routed.append(output[2]))
    model(input_ids=tokens)
    apply_plan(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    model(input_ids=tokens)
    gathered = [torch.empty_like(torch.stack(routed)) for _ in range(2)]
    torch.distributed.all_gather(gathered, torch.stack(routed))
    return gathered


def test_every_rank_routes_as_the_unsplit_model():
    mine, of_other_rank = run(routes, 2)
    assert mine.equal(of_other_rank)
    unsplit, split = mine.chunk(2)
    assert unsplit.equal(split)


def test_a_router_with_random_jitter_is_refused():
    model = modeling.build(config("mixtral", router_jitter_noise=0.1)).train()
    with pytest.raises(PlanError, match=r"layers.0.mlp.jitter_noise = 0.1: .*2 ranks"):
        check_plan(model, Degrees(tp=2))


def test_all_files_that_import_kernels_of_fla_are_known():
    """Stand-ins have to be installed before transformers' files that import FLA's kernels are imported, such as
    Qwen3-Next's."""
    named = ("qwen3_next", "mixtral", "llama", "gla")
    assert [name for name in named if kernels.calls_fla(modeling.load_config(name, "debug"))] == [
        "qwen3_next"
    ]


def test_norms_of_shared_heads_are_refused():
    model = modeling.build(
        modeling.load_config("stablelm", "debug", qk_layernorm=True, num_key_value_heads=2)
    )
    assert check_plan(model, Degrees(tp=2))
    with pytest.raises(PlanError, match=r"num_key_value_heads = 2 below tensor_parallel_degree = 4"):
        check_plan(model, Degrees(tp=4))


class Listed(nn.Module):
    """A mixture whose experts are a ModuleList of MLPs."""

    def __init__(self, model_config):
        super().__init__()
        self.gate = MixtralTopKRouter(model_config)
        model_config = copy.copy(model_config)
        model_config.mlp_bias = False
        self.experts = nn.ModuleList(LlamaMLP(model_config) for _ in range(model_config.num_local_experts))

    def forward(self, hidden_states):
        tokens = hidden_states.flatten(0, 1)
        _, weights, chosen = self.gate(tokens)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            weight = torch.where(chosen == index, weights, 0).sum(-1, keepdim=True)
            out = out + weight * expert(tokens)
        return out.view_as(hidden_states)


def test_experts_in_a_module_list_are_proved():
    model_config = config("mixtral")

    def build():
        model = build_real(model_config)
        for layer in model.model.layers:
            layer.mlp = Listed(model_config).double()
        return model

    report = proved(model_config, build=build, degrees=[2, 4])
    assert report.passed, report.table()


def test_in_float8_the_router_gets_the_sequence_in_its_own_dtype():
    """Only the shared expert has Linears, so the region is entered and left in the dtype of the sequence."""
    sizes = dict(hidden_size=128, vocab_size=128, intermediate_size=64, shared_expert_intermediate_size=64)
    model_config = config("qwen2_moe", moe_intermediate_size=32, **sizes)

    def build():
        model = build_real(model_config)
        convert_to_float8(
            model, Float8(recipe_name="tensorwise", emulate=True, filter_fqns=("shared_expert_gate",))
        )
        return model

    model = build()
    source = registered_plans()["qwen2_moe"](TPOptions(Degrees(tp=2), float8="tensorwise"))
    crossings = check(source, model).crossings
    assert crossings["model.layers.0.mlp"]["activations"] is None  # a dense MLP
    assert all(crossings["model.layers.1.mlp"].values())
    report = proved(model_config, build=build)
    assert report.passed, report.table()


@pytest.mark.parametrize(
    ("name", "fields", "dtype", "multiple"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 12}, None, 16),  # rows of 6 elements, 24 bytes
        # mixed precision casts weights to bfloat16
        (
            "qwen3_moe",
            {"moe_intermediate_size": 24},
            torch.bfloat16,
            32,
        ),
        ("gpt_oss", {"intermediate_size": 12}, None, 16),
    ],
)
def test_widths_that_grouped_mm_does_not_support_are_refused(name, fields, dtype, multiple):
    """The width is checked, because torch would fail in the first forward: "strides should be multiple of 16 bytes"."""
    model_config = config(name, **fields)
    with torch.device("meta"):
        model = modeling.build(model_config)
    width = next(iter(fields.values()))
    message = rf"16 bytes, .*grouped_mm .* = {width} .*experts.down_proj.*a width of {multiple}"
    with pytest.raises(PlanError, match=message):
        check_plan(model, Degrees(tp=2), dtype=dtype)
    with torch.device("meta"):
        fits = modeling.build(config(name, **dict.fromkeys(fields, multiple)))
    check_plan(fits, Degrees(tp=2), dtype=dtype)
    model.set_experts_implementation("batched_mm")
    check_plan(model, Degrees(tp=2), dtype=dtype)
