"""FLOPs per token, compared with sums by hand."""

import logging

import pytest
from torch import nn
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from titanplans import find_decoder, modeling
from titanplans.modeling.user_model import user_model_config

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def _count(config, seq_len):
    return modeling.count_flops(modeling.build(config), seq_len)


def test_softmax_attention_equals_the_formula_of_palm():
    total, flops = _count(modeling.load_config("transformer", "debug"), seq_len=512)
    layers, width, vocabulary = 4, 128, 4096
    assert total == 2_098_304
    assert flops == 6 * (total - vocabulary * width) + 12 * layers * width * 512


@pytest.mark.parametrize(("name", "field"), [("transformer", "window_size"), ("mistral", "sliding_window")])
def test_a_window_bounds_the_context(name, field):
    _, full = _count(modeling.load_config(name, "debug"), seq_len=64)
    _, windowed = _count(modeling.load_config(name, "debug", **{field: 64}), seq_len=4096)
    assert windowed == full


def test_sliding_layers_of_gemma_count_their_window():
    # two layers with a window of 8, two with full attention; 8 heads of 32
    config = modeling.load_config("gemma3_text", "debug")
    total, flops = _count(config, seq_len=512)
    assert flops == 6 * (total + 2 * (8 * 64 * 8) + 2 * (8 * 64 * 512))  # the embedding is tied to the head


def test_a_vision_tower_has_parameters_but_no_flops_per_text_token():
    # The same text model, with and without the vision tower.
    text, flops = _count(modeling.load_config("gemma3_text", "debug", num_key_value_heads=2), seq_len=128)
    total, flops_with = _count(modeling.load_config("gemma3", "debug"), seq_len=128)
    hidden, mlp, patch, positions = 32, 64, 3 * 14 * 14, 16
    layer = 4 * (hidden + 1) * hidden + 2 * hidden * mlp + mlp + hidden + 2 * 2 * hidden
    tower = (patch + 1) * hidden + positions * hidden + 2 * layer + 2 * hidden
    assert total == text + tower + hidden + hidden * 128  # the projector has a norm and a matrix
    assert flops_with == flops


def test_gated_linear_attention_does_not_grow_with_the_sequence():
    config = modeling.load_config("gla", "debug")
    total, flops = _count(config, seq_len=512)
    heads, d = 8, 16
    mixer = 4 * heads * (2 * d * d + 64 * (d + d))
    assert flops == 6 * (total - 4096 * 128 + mixer)
    assert _count(config, seq_len=65536)[1] == flops


@pytest.mark.parametrize("name", ["kda", "cyclic_flow_attention", "mom"])
def test_recurrences_named_attention_do_not_grow_with_the_sequence(name):
    config = modeling.load_config(name, "debug")
    assert _count(config, seq_len=512) == _count(config, seq_len=65536)


def test_a_token_uses_only_the_memories_that_it_is_routed_to():
    """A token uses two of three memories and the shared one, which has its own projections of keys, values and gates."""
    total, flops = _count(modeling.load_config("mom", "debug"), seq_len=64)
    of_memory = 2 * 128 * 128 + 2 * 128 * 8  # k, v, a, b
    assert flops == 6 * (total - 4096 * 128 + 4 * (2 * 128 * 128 - of_memory))


def test_hybrid_layers_are_counted_by_their_own_mixer():
    config = modeling.load_config("gla", "debug", attn={"layers": [1], "num_heads": 8})
    short, long = (_count(config, seq_len)[1] for seq_len in (512, 1024))
    assert long - short == 12 * 1 * 128 * 512


SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)


def test_tied_parameters_count_once_and_have_flops():
    untied, flops = _count(LlamaConfig(**SIZES, intermediate_size=96, tie_word_embeddings=False), 32)
    tied, tied_flops = _count(LlamaConfig(**SIZES, intermediate_size=96, tie_word_embeddings=True), 32)
    assert untied - tied == 128 * 64
    assert tied_flops == flops


def test_a_model_after_to_empty_counts_the_same():
    model = modeling.build(LlamaConfig(**SIZES, intermediate_size=96, tie_word_embeddings=True))
    before = modeling.count_flops(model, 32)
    model.to_empty(device="cpu")  # this unties weights
    assert modeling.count_flops(model, 32) == before


def test_a_token_has_the_flops_of_its_experts_only():
    sizes = SIZES | dict(num_key_value_heads=4, head_dim=16, moe_intermediate_size=32, num_experts=8)
    with_one, with_two = (_count(Qwen3MoeConfig(**sizes, num_experts_per_tok=k), 32)[1] for k in (1, 2))
    assert with_two - with_one == 6 * 2 * 3 * 64 * 32  # layers x (gate, up, down) of one expert


class GatedLinearAttention(nn.Module):
    """A user's mixer that has only its name in common with FLA's."""


class OddAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.window_size = 4, 8, (-1, -1)


class UserModel(nn.Module):
    """A user's model, whose config does not mention the experts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attn": make(), "experts": nn.ModuleList(nn.Linear(32, 32) for _ in range(2))})
            for make in (GatedLinearAttention, OddAttention)
        )
        self.lm_head = nn.Linear(32, 16)

    def forward(self, input_ids):
        """FLOPs are counted from the modules, so the code of this forward does not matter."""


def test_experts_that_the_config_does_not_mention_are_all_counted_with_a_log_line(caplog):
    config = user_model_config(f"{__name__}:UserModel", {})
    with caplog.at_level(logging.INFO, "titanplans"):
        total, flops = _count(config, 64)
    assert flops == 6 * (total - 16 * 32 + 4 * 2 * 8 * 64)
    (record,) = caplog.records
    assert record.message.startswith("the config of UserModel does not say how many experts")
    assert "(num_experts and num_experts_per_tok)" in record.message
    config.num_experts, config.num_experts_per_tok = 2, 1
    caplog.clear()
    assert flops - _count(config, 64)[1] == 6 * 2 * (32 * 32 + 32)
    assert not caplog.records


def test_learned_positions_have_no_flops():
    total, flops = _count(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=128, n_positions=256), 32)
    assert flops == 6 * (total - 256 * 64) + 12 * 64 * 32


def test_frozen_parameters_have_no_weight_gradient():
    model = modeling.build(modeling.load_config("llama", "debug"))
    _, every = modeling.count_flops(model, 16)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    _, fewer = modeling.count_flops(model, 16)
    assert every - fewer == 2 * model.model.layers[0].mlp.up_proj.weight.numel()


@pytest.mark.parametrize("name", ["transformer", "qwen3_moe", "gla", "gemma3", "yoco"])
def test_blocks_and_ends_add_up_to_the_model(name):
    model = modeling.build(modeling.load_config(name, "debug"))
    decoder = find_decoder(model)
    flops = modeling.flops_of_blocks(model, decoder, 64)
    total = modeling.count_flops(model, 64)[1]
    assert flops.first + sum(flops.blocks) + flops.last == pytest.approx(total, abs=len(flops.blocks) + 2)
    assert flops.first == 0
    assert len(flops.blocks) == len(decoder.blocks)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_counts_after_the_blocks_also_if_tied_to_the_embedding(tied):
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    model = modeling.build(config)
    flops = modeling.flops_of_blocks(model, find_decoder(model), 16)
    block = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32 + 4 * (8 + 8) * 16
    assert flops == ((6 * block,) * 3, 0, 6 * (512 * 32 + 32))


def test_blocks_of_a_hybrid_differ():
    config = modeling.load_config("gla", "debug", attn={"layers": [1], "num_heads": 8})
    model = modeling.build(config)
    short, long = (modeling.flops_of_blocks(model, find_decoder(model), seq_len) for seq_len in (512, 1024))
    grown = [after - before for before, after in zip(short.blocks, long.blocks, strict=True)]
    assert [growth > 0 for growth in grown] == [False, True, False, False]
