"""Plans that are derived from dataflow alone, against the plans that were written by hand and against the proof."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from tests import zoo
from titanplans import PlanError, TPOptions, registered_plans, verify
from titanplans.derive import analyse, derive, small_configs
from titanplans.derive.analyse import fused_kernels_of, kernels_of
from titanplans.derive.counts import Counts
from titanplans.modeling import build_real, load_config
from titanplans.plan.degrees import Degrees
from titanplans.split.decoder import find_decoder

pytestmark = pytest.mark.usefixtures("cpu_kernels")

BY_HAND = (
    *("llama", "qwen3", "gemma2", "phi3", "gpt2", "olmo2", "mixtral", "stablelm", "gpt_neox"),
    *("mpt", "bloom"),  # whose mixers get biases by head as an argument
)
"""Types whose registered plan has to be derived style by style, without reading it."""


def derived(name, **options):
    first, second = small_configs(load_config(name, "debug"))
    build = partial(partial, build_real, dtype=torch.float64)
    other = None if second is None else build(second)
    return derive(build(first), other_fn=other, exclude=[name], **options), build(first)


def styles(plan, model, degree):
    found = plan(TPOptions(Degrees(tp=degree, dp_shard=1))).full_plan(model)
    return {
        key: repr(style)
        for key, style in found.items()
        if "Region(" not in repr(style) or "Rowwise" in repr(style)
    }


@pytest.mark.parametrize(
    "name", [n if n in ("phi3", "mixtral") else pytest.param(n, marks=pytest.mark.thorough) for n in BY_HAND]
)
def test_the_plan_of_a_known_type_is_derived_and_proved(name):
    plan, make = derived(name, degrees=[2, Degrees(cp=2, dp_shard=1)], conditions="plain")
    assert plan.is_proved, plan.notes
    model = make()
    expected = styles(registered_plans()[name], model, 2)
    assert styles(plan.plan, model, 2).keys() == expected.keys()
    actual = styles(plan.plan, model, 2)
    assert {key: actual[key] for key in expected if actual[key] != expected[key]} == {}
    assert len(plan.text.splitlines()) < 40


class Mixer(nn.Module):
    """Attention with names of its own, and a stored count of heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.count = heads
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)

    def forward(self, hidden):
        q, k, v = (
            x.unflatten(-1, (self.count, -1)).transpose(1, 2) for x in self.inner(hidden).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outer(mixed.transpose(1, 2).flatten(2))


class Width(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer, self.mlp = Mixer(width, heads), Width(width, inner)

    def forward(self, hidden):
        hidden = hidden + self.mixer(self.first_norm(hidden))
        return hidden + self.mlp(self.second_norm(hidden))


class Model(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.embed = nn.Embedding(48, width)
        self.layers = nn.ModuleList([Block(width, heads, inner) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 48, bias=False)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Named(Model):
    """With a usual name of the head."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lm_head, self.head = self.head, None

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))


def build(cls, *sizes):
    torch.manual_seed(0)
    return cls(*sizes).double()


def test_a_model_of_ones_own_is_derived_with_sizes_that_hold_in_two_models():
    plan = derive(
        partial(build, Named, 64, 8, 96), "OwnPlan", other_fn=partial(build, Named, 96, 4, 80), degrees=[2, 4]
    )
    assert plan.is_proved, plan.notes
    assert plan.text.count(".in_features") == 3  # the rows of queries, keys and values
    assert 'self.divide_by_degree(attn, "count")' in plan.text
    assert 'mlp_in = ("up",)' in plan.text


class Outer(nn.Module):
    """A mixer that norms its input and calls another module, which counts the heads."""

    def __init__(self, width, mixer):
        super().__init__()
        self.inner_norm, self.attention = nn.LayerNorm(width), mixer

    def forward(self, hidden):
        return self.attention(self.inner_norm(hidden))


def test_heads_that_a_module_inside_the_mixer_counts_are_found():
    def make(*sizes):
        model = build(Named, *sizes)
        for layer in model.layers:
            layer.mixer = Outer(sizes[0], layer.mixer).double()
        return model

    other = partial(make, 96, 4, 80)
    plan = derive(partial(make, 64, 8, 96), other_fn=other, degrees=[2], conditions="plain")
    assert plan.is_proved, plan.notes
    assert 'return {"count": attn.attention.count}' in plan.text


def test_a_head_without_a_usual_name_is_the_module_that_makes_the_logits():
    other = partial(build, Model, 96, 4, 80)
    plan = derive(partial(build, Model, 64, 8, 96), other_fn=other, degrees=[2], conditions="plain")
    assert plan.is_proved, plan.notes
    assert '"head": self.vocab_head()' in plan.text


def test_small_configs_are_small_in_the_configs_inside_them_and_in_lists_by_layer():
    first, second = small_configs(CONFIG_MAPPING["qwen3_5"]())
    assert (first.text_config.hidden_size, second.text_config.hidden_size) == (64, 96)
    first, _ = small_configs(CONFIG_MAPPING["gemma3n_text"]())
    assert first.intermediate_size == [96, 96]
    assert small_configs(CONFIG_MAPPING["gemma4_unified_text"]())[0].num_hidden_layers == 2


class Sinks(Mixer):
    """Attention whose code asks whether it has scales of its heads' outputs."""

    def __init__(self, width, heads, has_scales):
        super().__init__(width, heads)
        self.scales = nn.Parameter(torch.ones(width)) if has_scales else None

    def forward(self, hidden):
        q, k, v = (
            x.unflatten(-1, (self.count, -1)).transpose(1, 2) for x in self.inner(hidden).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        return self.outer(mixed if self.scales is None else mixed * self.scales)


def test_mixers_of_one_class_of_which_some_lack_a_parameter_are_told_apart():
    def make(width, heads, inner):
        model = build(Named, width, heads, inner)
        for index, layer in enumerate(model.layers):
            layer.mixer = Sinks(width, heads, index == 0).double()
        return model

    other = partial(make, 96, 4, 80)
    plan = derive(partial(make, 64, 8, 96), other_fn=other, degrees=[2], conditions="plain")
    assert plan.is_proved, plan.notes
    assert 'if getattr(attn, "scales", None) is not None:' in plan.text


class BlockWithArgument(Block):
    def forward(self, hidden, factor):
        return super().forward(hidden) * factor


class WithArgument(Named):
    """Blocks multiply their output by a tensor that the model computes from all token ids."""

    def __init__(self, width, heads, inner):
        super().__init__(width, heads, inner)
        self.layers = nn.ModuleList([BlockWithArgument(width, heads, inner) for _ in range(2)])
        self.factors = nn.Embedding(48, width)

    def forward(self, input_ids):
        hidden, factor = self.embed(input_ids), self.factors(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, factor)
        return self.lm_head(self.norm(hidden))


def test_an_argument_that_blocks_combine_with_their_hidden_states_is_sharded():
    other = partial(build, WithArgument, 96, 4, 80)
    plan = derive(partial(build, WithArgument, 64, 8, 96), other_fn=other, degrees=[2], conditions="plain")
    assert plan.is_proved, plan.notes
    assert 'plan[""] = self.stream_arguments("factor")' in plan.text


def biases(heads, length):
    """Return a bias for each head and key, as ALiBi has it."""
    slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64)
    return slopes[:, None, None] * torch.arange(length)


class Biased(Mixer):
    def forward(self, hidden, bias):
        q, k, v = (
            x.unflatten(-1, (self.count, -1)).transpose(1, 2) for x in self.inner(hidden).chunk(3, dim=-1)
        )
        future = torch.full((hidden.shape[1],) * 2, float("-inf"), dtype=bias.dtype).triu(1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, bias + future)
        return self.outer(mixed.transpose(1, 2).flatten(2))


class BiasedBlock(Block):
    def forward(self, hidden, bias):
        hidden = hidden + self.mixer(self.first_norm(hidden), bias)
        return hidden + self.mlp(self.second_norm(hidden))


class WithBiases(Named):
    """Mixers get a bias for each head."""

    def __init__(self, width, heads, inner):
        super().__init__(width, heads, inner)
        self.heads = heads
        self.layers = nn.ModuleList([BiasedBlock(width, heads, inner) for _ in range(2)])
        for layer in self.layers:
            layer.mixer = Biased(width, heads)

    def biases(self, length):
        return biases(self.heads, length)

    def forward(self, input_ids):
        hidden, bias = self.embed(input_ids), self.biases(input_ids.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return self.lm_head(self.norm(hidden))


class WithBiasesOfNoFunction(WithBiases):
    def biases(self, length):
        return torch.arange(1, self.heads + 1, dtype=torch.float64)[:, None, None] * torch.arange(length)


@pytest.mark.parametrize(
    ("cls", "is_split"), [(WithBiases, True), (WithBiasesOfNoFunction, False)], ids=["function", "none"]
)
def test_an_argument_by_head_is_split_by_the_function_that_computes_it(cls, is_split):
    other = partial(build, cls, 96, 4, 80)
    plan = derive(partial(build, cls, 64, 8, 96), other_fn=other, degrees=[2], conditions="plain")
    assert plan.is_proved, plan.notes
    assert ('"biases": self.heads_of_result(model.heads),' in plan.text) == is_split
    assert ("Not split: mixer." in plan.text) != is_split


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("bamba", "attn.intermediate_size // self.degree // self.heads_per_rank(attn.n_groups)"),
        ("falcon_h1", '"norm.n_groups": self.heads_per_rank(attn.n_groups)'),
    ],
)
def test_a_norm_over_groups_is_right_for_more_ranks_than_groups(name, count):
    first, second = small_configs(load_config(name, "debug"))
    for config in (first, second):
        config.mamba_rms_norm = True  # only falcon_h1 has this field
    build = partial(partial, build_real, dtype=torch.float64)
    mixers = ["bamba", "falcon_h1", "granitemoehybrid"]  # which share a plan
    degrees = [4, Degrees(cp=4, dp_shard=1)]
    plan = derive(build(first), other_fn=build(second), exclude=mixers, degrees=degrees, conditions="plain")
    assert plan.is_proved, plan.notes
    assert count in "".join(map(str.strip, plan.text.splitlines()))
    for plan_class, groups in ((registered_plans()[name], 2), (registered_plans()[name], 1), (plan.plan, 1)):
        first.mamba_n_groups = groups
        report = verify(build(first), plan_class, degrees=[2 * groups], conditions="plain")
        assert report.passed, report.table()


class Unsplit(nn.Module):
    """A mixer that every channel of its output depends on in full."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, hidden):
        return torch.tanh(hidden @ self.weight).cumsum(1)


def test_a_model_without_anything_to_split_is_refused():
    def make():
        model = build(Named, 64, 8, 96)
        for layer in model.layers:
            layer.mixer, layer.mlp = Unsplit(64).double(), nn.Identity()
        return model

    with pytest.raises(
        PlanError, match=r"no plan is derived for Named: mixer can't be split, since .*; write one by hand"
    ):
        derive(make)


def test_what_can_not_be_split_runs_on_every_rank_and_is_named():
    def make():
        model = build(Named, 64, 8, 96)
        for layer in model.layers:
            layer.mixer = Unsplit(64).double()
        return model

    plan = derive(make, degrees=[2], conditions="plain")
    assert plan.is_proved, plan.notes
    assert "Not split: mixer." in plan.text
    assert any(note.startswith("mixer (Unsplit) is not split: ") for note in plan.notes)


class Random(Named):
    def forward(self, input_ids):
        return nn.functional.dropout(super().forward(input_ids), 0.1)


class Overflowing(Named):
    def forward(self, input_ids):
        return super().forward(input_ids) * float("inf")


class Broken(Named):
    def forward(self, input_ids):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Random, "two runs differ, so it draws random numbers"),
        (Overflowing, "its logits are not finite in float64"),
        (Broken, "the unsplit model does not run on a CPU: ValueError: no"),
    ],
)
def test_a_model_whose_dataflow_can_not_be_seen_is_refused(cls, message):
    with pytest.raises(PlanError, match=f"derive {cls.__name__}: {message}"):
        derive(partial(build, cls, 64, 8, 96))


def test_a_region_with_which_no_proof_passes_is_not_split(monkeypatch):
    """As if no counts of the mixer's code were found: each plan is wrong until every rank runs the mixer in full."""
    monkeypatch.setattr(analyse, "find_counts", lambda split: Counts({}, {}))
    plan = derive(partial(build, Named, 64, 8, 96), degrees=[2], conditions="plain")
    assert plan.is_proved, plan.notes
    assert plan.proofs > 2
    assert "Not split: mixer." in plan.text
    assert "mixer is not split: the proof failed with it" in plan.notes


@pytest.mark.parametrize(
    ("name", "fused"),
    [("falcon_mamba", ["mamba_inner_fn"]), ("bamba", ["mamba2_split_conv1d_scan_combined"]), ("jamba", [])],
)
def test_kernels_that_replace_modules_of_a_mixer_are_switched_off(name, fused):
    mixer = next(iter(find_decoder(zoo.build(name)).mixers.values()))
    assert fused_kernels_of(mixer) == fused
    assert set(fused) | {"causal_conv1d_fn"} <= set(kernels_of(mixer))
    plan = registered_plans()[name](TPOptions(Degrees(tp=2, dp_shard=1)))
    assert list(plan.local_functions(mixer)) == fused
