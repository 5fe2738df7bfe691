"""Parameter groups by pattern, weight decay, and which optimizer has which parameters."""

import itertools
import tomllib
from typing import Any

import pytest

from tests import zoo
from tests.support import process_groups
from tests.support.refusals import refusal
from titanplans import kernels, modeling
from titanplans.config.sections.optimization import Optimizer
from titanplans.errors import ConfigError, OptionError, ParallelError
from titanplans.parallel import Compile, DDPConfig, Degrees, FSDP2Config, Mesh, parallelize
from titanplans.parallel.compile import compile_optimizer
from titanplans.parallel.optimizers.build import build_optimizers, group_parameters
from titanplans.parallel.optimizers.roles import find_roles

MARKED = ("gated_deltanet", "mamba")
"""Models with vectors, and a matrix, that are marked `_no_weight_decay`."""


def meta(name: str, **sizes: Any):
    kernels.install("cpu")
    return modeling.build(zoo.config(name, **sizes))


def without_decay(model) -> set[str]:
    """Return the names of the parameters that do not decay."""
    groups = group_parameters(model, Optimizer())
    return {name for group in groups if not group.settings["weight_decay"] for name in group.parameters}


def in_muon(model) -> dict[str, Any]:
    """Return the sections of Muon's parameters by name."""
    roles = find_roles(model)
    groups = group_parameters(model, Optimizer(name="Muon"))
    return {n: roles[n].sections for group in groups if group.optimizer == "Muon" for n in group.parameters}


def of_layer(names) -> set[str]:
    return {name.partition("layers.0.")[2] for name in names if "layers.0." in name}


def test_vectors_norms_biases_and_marked_ones_do_not_decay():
    assert without_decay(meta("llama", num_hidden_layers=1, head_dim=16)) == {
        f"model.layers.0.{name}"
        for name in (
            *(f"self_attn.{p}_proj.bias" for p in "qkvo"), *(f"mlp.{p}_proj.bias" for p in ("gate", "up", "down")),
            "input_layernorm.weight", "post_attention_layernorm.weight",
        )
    } | {"model.norm.weight"}  # fmt: skip
    delta = of_layer(without_decay(meta("gated_deltanet")))
    assert {"attn.A_log", "attn.dt_bias", "attn.o_norm.weight"} <= delta
    assert "attn.q_conv1d.weight" not in delta
    # Mamba's A_log is a matrix.
    assert {"mixer.A_log", "mixer.D", "mixer.dt_proj.bias"} <= of_layer(without_decay(meta("mamba")))
    assert {"mlp.experts.gate_up_proj_bias", "self_attn.sinks"} <= of_layer(without_decay(meta("gpt_oss")))
    assert {"attn.x_r", "attn.k_k"} <= of_layer(without_decay(meta("rwkv7")))  # [1, 1, width]


def test_with_decay_all_there_is_one_group_that_decays():
    model = meta("gated_deltanet")
    (group,) = group_parameters(model, Optimizer(decay_all=True, weight_decay=0.3))
    assert set(group.parameters) == {name for name, _ in model.named_parameters()}
    assert group.settings["weight_decay"] == 0.3


def test_muon_has_the_matrices_of_hidden_layers():
    everything = {name for name, _ in meta("llama").named_parameters()}
    muon = in_muon(meta("llama"))
    assert set(muon) == {n for n in everything if n.endswith("_proj.weight")}
    assert not any(muon.values())
    tied = in_muon(meta("qwen3"))
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & set(tied)
    mixture = in_muon(meta("mixtral"))
    assert of_layer(mixture) >= {"mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert mixture["model.layers.0.mlp.experts.gate_up_proj"] == (1, (48, 48))
    gla = of_layer(in_muon(meta("gla")))
    assert not [name for name in gla if "conv" in name or "norm" in name or "bias" in name]
    phi = in_muon(meta("phi3"))
    assert phi["model.layers.0.self_attn.qkv_proj.weight"] == (0, (64, 16, 16))
    assert "mixer.A_log" not in of_layer(in_muon(meta("mamba")))


GROUPS = Optimizer(
    lr=1e-3,
    groups=(  # type: ignore[arg-type]
        {"pattern": r"layers\.0\.", "lr": 1e-4},
        {"pattern": "_proj", "name": "Muon", "momentum": 0.8},
        {"pattern": "norm", "weight_decay": 0.2, "beta2": 0.9},
    ),
)


def test_the_first_pattern_that_matches_has_the_parameter():
    model = meta("llama", num_hidden_layers=2, attention_bias=False, mlp_bias=False)
    groups = group_parameters(model, GROUPS)
    actual = [(g.optimizer, g.settings["lr"], g.settings["weight_decay"], set(g.parameters)) for g in groups]
    projections = {f"self_attn.{letter}_proj.weight" for letter in "qkvo"}
    projections |= {f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    first, second = ({f"model.layers.{n}.{name}" for name in (*projections, *norms)} for n in (0, 1))
    norms_of_first = {name for name in first if "norm" in name}
    assert sorted(actual, key=str) == sorted(
        [
            ("AdamW", 1e-4, 0.1, first - norms_of_first),
            ("AdamW", 1e-4, 0.0, norms_of_first),
            ("Muon", 1e-3, 0.1, {name for name in second if "_proj" in name}),
            ("AdamW", 1e-3, 0.2, {"model.norm.weight", *(name for name in second if "norm" in name)}),
            ("AdamW", 1e-3, 0.1, {"model.embed_tokens.weight", "lm_head.weight"}),
        ],
        key=str,
    )
    adamw, muon = build_optimizers(model, GROUPS)
    assert [group["betas"] for group in adamw.param_groups][2] == (0.9, 0.9)
    assert [group["momentum"] for group in muon.param_groups] == [0.8]
    assert muon.param_groups[0]["param_names"] == list(groups[2].parameters)


REFUSED = {
    "(pattern = \"q_prj\"): it matches no parameter": [{"pattern": "q_prj", "lr": 1.0}],
    "table 2 (pattern = \"q_proj\"): earlier groups already match": [
        {"pattern": "proj", "lr": 1.0}, {"pattern": "q_proj", "lr": 2.0}
    ],
    "momentum = 0.5 does nothing": [{"pattern": "norm", "momentum": 0.5}],
    "beta1 = 0.5 does nothing": [{"pattern": "q_proj.weight", "beta1": 0.5}],
    "model.norm.weight is of 1 dimension in a LlamaRMSNorm": [
        {"pattern": r"model\.norm", "name": "Muon"}
    ],
    "it matches only frozen parameters": [{"pattern": "embed", "lr": 1.0}],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_a_group_that_can_not_be_applied_is_refused(message):
    model = meta("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    options = Optimizer(name="Muon", groups=REFUSED[message])  # type: ignore[arg-type]
    assert message in refusal(group_parameters, model, options, kind=ConfigError)


CONTRADICTIONS = {
    "optimizer.groups.pattern = \"(\": expected": dict(groups=[{"pattern": "(", "lr": 1.0}]),
    "optimizer.groups.pattern = \"\": expected a string": dict(groups=[{"lr": 1.0}]),
    "optimizer.groups.pattern = \"a\": the group sets nothing": dict(groups=[{"pattern": "a"}]),
    "optimizer.groups.lrr = 1.0: no such option": dict(groups=[{"pattern": "a", "lrr": 1.0}]),
    'optimizer.groups.eps = 1.0: name = "Muon" does not use it': dict(
        groups=[{"pattern": "a", "name": "Muon", "eps": 1.0}]
    ),
    'optimizer.groups.ns_steps = 3: name = "AdamW" does not use it': dict(
        groups=[{"pattern": "a", "name": "AdamW", "ns_steps": 3}]
    ),
    'optimizer.momentum = 0.5: has no effect unless optimizer.name = "Muon"': dict(momentum=0.5),
    "optimizer.implementation = \"fused_opt_states_bf16\": Muon": dict(name="Muon", implementation="fused_opt_states_bf16"),
}  # fmt: skip


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused(message):
    assert message in refusal(Optimizer, **CONTRADICTIONS[message], kind=OptionError)


def test_muon_without_a_matrix_is_refused():
    model = meta("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    with pytest.raises(ConfigError, match=r'optimizer.name = "Muon": no trainable parameter'):
        group_parameters(model, Optimizer(name="Muon"))


def test_groups_are_written_and_read_as_toml():
    assert Optimizer(**tomllib.loads(GROUPS.to_toml())) == GROUPS


def test_muons_step_is_not_compiled():
    _, muon = build_optimizers(meta("llama"), Optimizer(name="Muon"))
    with pytest.raises(ParallelError, match="Muon's step communicates"):
        compile_optimizer(muon, Compile(enable=True, components=("optimizer",)))


WAYS = {"tp": dict(tp=2, dp_shard=1), "fsdp": dict(dp_shard=2), "ddp": dict(dp_replicate=2, dp_shard=1)}


def on_two_ranks(rank: int) -> dict:
    results = {}
    for name, how in itertools.product(MARKED, WAYS):
        model, mesh = meta(name), Mesh(Degrees(**WAYS[how]), "cpu")
        parallelize(model, parallel_dims=mesh, config=DDPConfig() if how == "ddp" else FSDP2Config())
        model.to_empty(device="cpu")
        results[name, how] = without_decay(model)
    model = meta("llama")
    config = FSDP2Config(
        float8={"recipe_name": "tensorwise", "emulate": True},
        activation_checkpoint={"mode": "full"},
        compile={"enable": True, "backend": "aot_eager"},
    )  # fmt: skip
    parallelize(model, parallel_dims=Mesh(Degrees(dp_shard=2), "cpu"), config=config)
    results["all at once"] = without_decay(model)
    return results


two = process_groups.module_fixture(on_two_ranks, 2)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", MARKED)
def test_marks_are_kept_by_sharding_and_materialization(two, name, how):
    expected = without_decay(meta(name))
    assert any("A_log" in each for each in expected)
    assert two[name, how] == expected


def test_names_are_those_of_state_dicts_for_wrapped_blocks(two):
    assert two["all at once"] == without_decay(meta("llama"))
