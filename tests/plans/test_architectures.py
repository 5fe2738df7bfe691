"""Every registered plan proved: at tp 2, 4 and 8, with every combination of options, at even and at odd sizes.

The sizes are small and the structure is the family's own: its `debug` flavor, which has fewer key/value
heads than 8 in most families, cut down to two blocks.
"""

from functools import partial

import pytest

from titanplans import modeling, registered_plans
from titanplans.modeling import kernels
from titanplans.modeling.samples import build_real, sample_inputs
from titanplans.proof import verify

FLA = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=48, vocab_size=96)
DENSE = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=48, vocab_size=96, head_dim=16)
SMALL = {
    "transformer": FLA | dict(num_kv_heads=4, qk_norm=True, qkv_bias=True),
    "gla": FLA | dict(num_kv_heads=2, use_short_conv=True),
    "llama": DENSE | dict(num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "mistral": DENSE | dict(num_key_value_heads=2, sliding_window=6),
    "qwen2": {k: v for k, v in DENSE.items() if k != "head_dim"} | dict(num_key_value_heads=4),
    "qwen3": DENSE | dict(num_key_value_heads=8, tie_word_embeddings=True),
    "gemma3_text": DENSE | dict(final_logit_softcapping=20.0, attn_logit_softcapping=30.0),
    "gemma3": dict(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=48,
        head_dim=16,
        vision_config=dict(num_hidden_layers=1),
    ),
}
ODD = dict(intermediate_size=45, vocab_size=97)


@pytest.fixture(autouse=True, scope="module")
def cpu_kernels():
    kernels.install("cpu")


def prove(name, overrides, *, seq_len=16, batch_size=2, **options):
    config = modeling.load_config(name, "debug", **overrides)
    inputs = sample_inputs(config, batch_size=batch_size, seq_len=seq_len, seed=0)
    report = verify(partial(build_real, config), inputs=inputs, **options)
    assert report.passed, report.table()
    return report


def test_every_registered_plan_is_here():
    assert {
        name for name, plan in registered_plans().items() if plan.__module__.startswith("titanplans.plans.")
    } == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_equal_to_the_whole_model(name):
    report = prove(name, SMALL[name])
    assert [c.degree for c in report.cases] == 4 * [2] + 4 * [4] + 4 * [8]
    assert not report.refused


@pytest.mark.parametrize("name", [name for name in SMALL if name != "gemma3"])
def test_sizes_that_the_degree_does_not_divide(name):
    prove(name, SMALL[name] | ODD, seq_len=19, degrees=[4])


def test_images_across_shards_of_an_odd_sequence():
    prove("gemma3", SMALL["gemma3"] | dict(intermediate_size=45), seq_len=19, degrees=[4])


def test_qwen3_with_twice_as_many_ranks_as_key_value_heads():
    heads = dict(num_attention_heads=16, num_key_value_heads=8, head_dim=4)  # Qwen3-0.6B's
    prove("qwen3", SMALL["qwen3"] | heads | dict(num_hidden_layers=1), degrees=[16])


def test_gemma3_with_one_key_value_head():
    heads = dict(num_attention_heads=4, num_key_value_heads=1)  # Gemma3-1B's
    prove("gemma3_text", SMALL["gemma3_text"] | heads, degrees=[4])
