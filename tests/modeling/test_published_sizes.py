"""The named flavors have the published parameter counts, and equal the config.json files of the hub."""

import json
import time

import pytest

from tests import zoo
from tests.support.paths import GENERATED
from titanplans import modeling

# (family, flavor) -> (the published number of parameters, its source)
#   keras   keras-team/keras-hub, commit 71453d0, "params" of the presets, which another implementation counts
#   card    the model card: its text, or the count that the hub displays
FIGURES = {
    ("llama", "3.2-1B"): ("1.24B", "card"),  # its 1.23B is truncated, not rounded
    ("llama", "3.2-3B"): ("3.21B", "card"),
    ("llama", "3.1-8B"): ("8.03B", "keras"),
    ("llama", "3.1-70B"): ("70.6B", "card"),
    ("llama", "2-7B"): ("6.74B", "keras"),
    ("mistral", "7B-v0.3"): ("7.25B", "keras"),
    ("mistral", "Nemo-12B"): ("12.2B", "card"),
    ("qwen2", "0.5B"): ("0.49B", "keras"),
    ("qwen2", "1.5B"): ("1.54B", "keras"),  # qwen2.5_math_1.5b, with the same sizes
    ("qwen2", "3B"): ("3.09B", "keras"),
    # The card's 7.61B is truncated. The cards of 14B and 32B say 14.7B and 32.5B, which their config.json contradicts.
    ("qwen2", "7B"): ("7.62B", "keras"),  # qwen2.5_math_7b, with the same sizes
    ("qwen2", "14B"): ("14.8B", "card"),
    ("qwen2", "32B"): ("32.8B", "keras"),
    ("qwen2", "72B"): ("72.7B", "keras"),
    ("qwen3", "0.6B"): ("0.6B", "keras"),
    ("qwen3", "1.7B"): ("1.7B", "keras"),
    ("qwen3", "4B"): ("4.0B", "keras"),
    ("qwen3", "8B"): ("8.2B", "keras"),
    ("qwen3", "14B"): ("14.8B", "keras"),
    ("qwen3", "32B"): ("32.8B", "keras"),
    ("gemma3_text", "270M"): ("0.27B", "keras"),
    ("gemma3_text", "1B"): ("1.0B", "keras"),
    # The text presets of keras lack the 64 rows of vocabulary that transformers adds for the image token.
    ("gemma3_text", "4B"): ("3.88B", "keras"),
    ("gemma3_text", "12B"): ("11.8B", "keras"),
    ("gemma3_text", "27B"): ("27.0B", "keras"),
    ("mixtral", "8x7B"): ("46.7B", "card"),
    ("qwen2_moe", "1.5-A2.7B"): ("14.3B", "card"),
    ("qwen3_moe", "30B-A3B"): ("30.5B", "card"),
    ("qwen3_moe", "235B-A22B"): ("235B", "card"),
    ("qwen3_next", "80B-A3B"): ("80B", "card"),
    ("deepseek_v3", "671B"): ("671B", "card"),
    ("gpt_oss", "20b"): ("21B", "card"),
    ("gpt_oss", "120b"): ("117B", "card"),
    ("gemma3", "4B"): ("4.3B", "keras"),  # medgemma_4b, which has the 64 rows
    ("gemma3", "12B"): ("12.2B", "keras"),
    ("gemma3", "27B"): ("27.4B", "keras"),  # medgemma_instruct_27b
    ("apertus", "8B"): ("8.05B", "card"),
    ("apertus", "70B"): ("70.6B", "card"),
    ("bamba", "9B"): ("9.78B", "card"),
    ("bloom", "560M"): ("0.559B", "card"),
    ("bloom", "1.7B"): ("1.72B", "card"),
    ("bloom", "7.1B"): ("7.07B", "card"),
    ("bloom", "176B"): ("176.247B", "card"),
    ("cohere", "35B"): ("35B", "card"),
    ("cwm", "32B"): ("32.6B", "card"),
    ("dots1", "142B-A14B"): ("143B", "card"),
    ("ernie4_5", "0.3B"): ("0.36B", "card"),
    ("exaone4", "1.2B"): ("1.28B", "card"),
    ("exaone4", "32B"): ("32.0B", "card"),
    ("falcon_h1", "34B"): ("33.6B", "card"),
    ("falcon_mamba", "7B"): ("7.27B", "card"),
    ("gemma", "2B"): ("2.51B", "keras"),
    ("gemma", "7B"): ("8.54B", "keras"),
    ("glm", "9B"): ("9.4B", "card"),
    ("gpt_bigcode", "15B"): ("15.5B", "card"),
    ("gptj", "6B"): ("6.05B", "card"),
    ("granitemoe", "1B-A400M"): ("1.33B", "card"),
    ("granitemoe", "3B-A800M"): ("3.3B", "card"),
    ("granitemoehybrid", "7B-A1B"): ("6.9B", "card"),
    ("granitemoehybrid", "32B-A9B"): ("32.2B", "card"),
    ("hunyuan_v1_moe", "80B-A13B"): ("80.4B", "card"),
    ("jamba", "52B"): ("51.6B", "card"),
    ("kimi_linear", "48B-A3B"): ("49.1B", "card"),
    ("lfm2", "350M"): ("0.354B", "card"),
    ("lfm2", "700M"): ("0.742B", "card"),
    ("lfm2", "1.2B"): ("1.170B", "card"),
    ("lfm2_moe", "8B-A1B"): ("8.34B", "card"),
    ("minimax", "456B-A46B"): ("456B", "card"),
    ("minimax_m2", "230B-A10B"): ("229B", "card"),
    ("nemotron_h", "8B"): ("8.10B", "card"),
    ("olmo", "1B"): ("1.18B", "card"),
    ("olmo", "7B"): ("6.89B", "card"),
    ("phi", "2"): ("2.78B", "card"),
    ("seed_oss", "36B"): ("36.2B", "card"),
}
"""Other flavors have no published count; the page has the sum of their shapes."""

# The cards of Qwen also state the count without embedding and head.
WITHOUT_EMBEDDINGS = {
    ("qwen2", "0.5B"): "0.36B",
    ("qwen2", "1.5B"): "1.31B",
    ("qwen2", "3B"): "2.77B",
    ("qwen2", "7B"): "6.53B",
    ("qwen3", "0.6B"): "0.44B",
    ("qwen3", "1.7B"): "1.4B",
    ("qwen3", "4B"): "3.6B",
    ("qwen3", "8B"): "6.95B",
    ("qwen3", "14B"): "13.2B",
    ("qwen3", "32B"): "31.2B",
}
DEBUG = ("transformer", "gla", "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3")


def _on_the_page():
    """Return the flavors' parameter counts from docs/generated/models.md."""
    page = (GENERATED / "models.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("| ")]
    return {(row[1], row[2]): int(row[-3].replace(",", "")) for row in rows if row[1] in modeling.available()}


PARAMETERS = _on_the_page()


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def _rounded(count, like):
    """Return `count` in billions with as many decimals as the published text `like` has."""
    decimals = len(like.removesuffix("B").partition(".")[2])
    return f"{count / 1e9:.{decimals}f}B"


def test_every_flavor_has_a_count():
    """Debug flavors of families that only docs/generated/architectures.md lists are excepted."""
    named = {(n, flavor) for n, flavors in modeling.available().items() for flavor in flavors}
    assert named - {(n, "debug") for n in zoo.BESIDES} == set(PARAMETERS) >= set(FIGURES)


@pytest.mark.parametrize(("name", "flavor"), PARAMETERS)
def test_a_flavor_has_its_published_size_and_needs_no_memory(name, flavor):
    start = time.perf_counter()
    model = modeling.build(modeling.load_config(name, flavor))
    seconds = time.perf_counter() - start
    count = sum(p.numel() for p in model.parameters())
    assert count == PARAMETERS[name, flavor]
    published, _ = FIGURES.get((name, flavor), (None, None))
    assert published is None or _rounded(count, published) == published
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert seconds < 3  # measured: at most 0.4 s on one core


@pytest.mark.parametrize(("name", "flavor"), WITHOUT_EMBEDDINGS)
def test_the_count_without_embedding_and_head(name, flavor):
    model = modeling.build(modeling.load_config(name, flavor))
    tables = {id(m.weight): m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    remaining = PARAMETERS[name, flavor] - sum(weight.numel() for weight in tables.values())
    published = WITHOUT_EMBEDDINGS[name, flavor]
    assert _rounded(remaining, published) == published


@pytest.mark.parametrize("name", DEBUG)
def test_debug_splits_at_every_small_degree(name):
    config = modeling.load_config(name, "debug").get_text_config()
    heads = config.num_heads if name in ("transformer", "gla") else config.num_attention_heads
    for degree in (2, 4, 8):
        assert heads % degree == 0
        assert config.vocab_size % degree == 0
        assert (config.intermediate_size or 512) % degree == 0  # None: FLA derives 512


def test_the_debug_flavors_have_eight_key_value_heads_and_fewer():
    heads = {
        name: modeling.load_config(name, "debug").get_text_config().num_key_value_heads
        for name in DEBUG
        if name not in ("transformer", "gla")
    }
    assert heads == {"llama": 8, "mistral": 2, "qwen2": 4, "qwen3": 4, "gemma3_text": 1, "gemma3": 2}


# Files of the hub in the format of older releases, with `rope_theta`, `rope_scaling` and a pattern of layers.
PUBLISHED = {
    # meta-llama/Llama-3.2-1B, from its copy in kevinstephano/thunder_model_blocks, commit 5c083b0
    ("llama", "3.2-1B"): {
        "model_type": "llama",
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    # mistralai/Mistral-Nemo-Base-2407, from the same source
    ("mistral", "Nemo-12B"): {
        "model_type": "mistral",
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "max_position_embeddings": 128000,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
    # google/gemma-3-1b-it, from its copy in Liwink/gemma-jax, models/README.md
    ("gemma3_text", "1B"): {
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
}


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_a_published_config_file_gives_the_same_architecture(tmp_path, name, flavor):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name, flavor]))
    from_file, named = (
        c.to_dict() for c in (modeling.load_config_file(path), modeling.load_config(name, flavor))
    )
    from_file.pop(
        "sliding_window_pattern", None
    )  # transformers keeps this next to the layer types that it defines
    assert from_file == named


def test_layers_windows_and_rope_bases_of_gemma():
    config = modeling.load_config("gemma3", "27B").text_config
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == list(
        range(5, 62, 6)
    )
    assert (config.sliding_window, config.query_pre_attn_scalar) == (1024, 168)
    assert config.rope_parameters["full_attention"] == {
        "rope_type": "linear",
        "rope_theta": 1e6,
        "factor": 8.0,
    }
    kinds = modeling.load_config("gemma3_text", "debug").layer_types
    assert kinds == ["sliding_attention", "full_attention"] * 2


def test_the_image_token_is_in_the_vocabulary():
    for flavor in modeling.available()["gemma3"]:
        config = modeling.load_config("gemma3", flavor)
        assert config.image_token_id < config.text_config.vocab_size
        vision = config.vision_config
        patches, tokens = (vision.image_size // vision.patch_size) ** 2, config.mm_tokens_per_image
        assert patches == tokens * round((patches / tokens) ** 0.5) ** 2  # patches are averaged over squares


def test_a_config_file_with_two_towers_loads(tmp_path):
    config = modeling.load_config("gemma3", "debug")
    config.save_pretrained(tmp_path)
    loaded = modeling.load_config_file(tmp_path)
    assert loaded.text_config.to_dict() == config.text_config.to_dict()
    assert loaded.vision_config.to_dict() == config.vision_config.to_dict()
    first, second = (dict(modeling.build(c).named_parameters()) for c in (config, loaded))
    assert {name: p.shape for name, p in first.items()} == {name: p.shape for name, p in second.items()}
