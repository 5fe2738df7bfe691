"""An impossible value in a config.json is a one-line error with the file, the key, the value, and what is expected."""

import json

import pytest
from transformers import CONFIG_MAPPING

from tests.support import refusals
from titanplans import modeling
from titanplans.kernels import install
from titanplans.modeling import ModelError
from titanplans.modeling.config_values import check_values

DENSE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GLA = {"model_type": "gla", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4}
TEXT = {key: value for key, value in DENSE.items() if key != "model_type"}
IMAGES = {
    "model_type": "gemma3",
    "text_config": TEXT,
    "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}
SIZE = "expected a number, from 1 to 2147483647"

WRONG = [
    (DENSE, {"vocab_size": -1}, f"vocab_size = -1: {SIZE}"),
    (DENSE, {"hidden_size": 0}, f"hidden_size = 0: {SIZE}"),
    (DENSE, {"hidden_size": "64"}, 'hidden_size = "64": expected an integer'),
    (DENSE, {"intermediate_size": 10**18}, f"intermediate_size = 1000000000000000000: {SIZE}"),
    (DENSE, {"intermediate_size": 0}, f"intermediate_size = 0: {SIZE}"),
    (DENSE, {"initializer_range": -1}, "initializer_range = -1: expected a number, at least 0"),
    (DENSE, {"num_attention_heads": 0}, f"num_attention_heads = 0: {SIZE}"),
    (DENSE, {"num_key_value_heads": 0}, f"num_key_value_heads = 0: {SIZE}"),
    (DENSE, {"num_key_value_heads": [1]}, "num_key_value_heads = [1]: expected an integer or null"),
    (DENSE, {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: expected a number, from 1 to 10000"),
    (DENSE, {"num_hidden_layers": True}, "num_hidden_layers = true: expected an integer"),
    (DENSE, {"rms_norm_eps": float("nan")}, "rms_norm_eps = NaN: expected a number, at least 0"),
    (DENSE, {"attention_dropout": 1.5}, "attention_dropout = 1.5: expected a number, from 0 to 1"),
    (DENSE, {"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta = -1: expected a number"),
    (DENSE, {"torch_dtype": "x"}, 'torch_dtype = "x": expected the name'),
    (GLA, {"hidden_size": "64"}, 'hidden_size = "64": expected an integer'),
    (GLA, {"hidden_size": {}}, "hidden_size = {}: expected an integer"),
    (GLA, {"vocab_size": None}, "vocab_size = null: expected an integer"),
    (GLA, {"num_heads": 0}, f"num_heads = 0: {SIZE}"),
    (GLA, {"num_heads": "x"}, 'num_heads = "x": expected an integer'),
    (GLA, {"hidden_ratio": -1}, "hidden_ratio = -1: expected a number, above 0"),
    (GLA, {"expand_k": -1}, "expand_k = -1: expected a number, above 0"),
    (GLA, {"use_short_conv": "yes"}, 'use_short_conv = "yes": expected true or false'),
    (GLA, {"attn": {"layers": [0], "num_heads": 0}}, f"attn.num_heads = 0: {SIZE}"),
    (IMAGES, {"mm_tokens_per_image": 0}, f"mm_tokens_per_image = 0: {SIZE}"),
    (IMAGES, {"text_config": TEXT | {"hidden_size": -1}}, f"text_config.hidden_size = -1: {SIZE}"),
    (IMAGES, {"vision_config": {"patch_size": 0}}, f"vision_config.patch_size = 0: {SIZE}"),
    (
        DENSE,
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        'quantization_config (quant_method = "fp8"): a quantised model',
    ),
    (
        IMAGES,
        {"text_config": TEXT | {"quantization_config": {"quant_method": "mxfp4"}}},
        'text_config.quantization_config (quant_method = "mxfp4"): a quantised model',
    ),
]  # fmt: skip


def refusal(path, values) -> str:
    """Return the error that reading a config.json with `values`, or building its model, raises."""
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return refusals.refusal(lambda: modeling.build(modeling.load_config_file(path)), kind=ModelError)


@pytest.mark.parametrize(("values", "change", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_an_impossible_value_is_refused_with_its_file_and_key(tmp_path, values, change, message):
    path = tmp_path / "config.json"
    assert refusal(path, values | change).startswith(f"model config {str(path)!r}: {message}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            DENSE | {"hidden_act": "x"},
            "model_type 'llama' can't be built with the values of its config: it knows no hidden_act = 'x' (",
        ),
        (
            GLA | {"feature_map": "x"},
            "model_type 'gla' can't be built with the values of its config: it knows no feature_map = 'x' (",
        ),
        (
            IMAGES | {"mm_tokens_per_image": None},
            "can't be built with the values of its config: TypeError: unsupported",
        ),
        (DENSE | {"model_type": ["llama"]}, "model_type ['llama'] is in neither"),
        (DENSE | {"id2label": [1]}, "config.json': 'list' object has no attribute 'items'"),
        (
            GLA | {"model_type": "rwkv7", "value_dim": [64]},
            "config.json': value_dim must have the same length",
        ),
        ("[" * 100_000, "is not JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors_of_the_constructor_are_one_line_too(tmp_path, values, message):
    install("cpu")
    assert message in refusal(tmp_path / "config.json", values)


def test_defaults_of_a_class_are_not_refused():
    """The defaults of every class with a language model are accepted, although some break the rules."""
    import fla.models  # noqa: F401

    for kind in (
        "llama",
        "qwen3",
        "gemma3",
        "deepseek_v3",
        "mixtral",
        "gpt2",
        "phi4_multimodal",
        "mla",
        "samba",
        "mamba2",
    ):
        values = json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict(), default=str))
        check_values(values, CONFIG_MAPPING[kind], kind)


def test_null_is_the_default_of_a_nested_config(tmp_path):
    values = json.loads(json.dumps(CONFIG_MAPPING["gemma3"]().to_dict(), default=str)) | {
        "vision_config": None
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert modeling.load_config_file(tmp_path).vision_config.hidden_size > 0


def test_an_unknown_key_is_reported_once(tmp_path, caplog):
    values = IMAGES | {"text_config": TEXT | {"rope_theta": 10.0, "head_dims": 16}, "image_sise_": 3}
    (tmp_path / "config.json").write_text(
        json.dumps(values | {"_name_or_path": "x", "torch_dtype": "float32"})
    )
    with caplog.at_level("INFO", logger="titanplans"):
        modeling.load_config_file(tmp_path)
        modeling.load_config_file(tmp_path)
        values = IMAGES | modeling.load_config("gemma3", "debug").to_dict()
        (tmp_path / "config.json").write_text(json.dumps(values))
        modeling.load_config_file(tmp_path)
    messages = [record.message for record in caplog.records if record.name.startswith("titanplans")]
    heads, images = (note.partition(": ")[2] for note in messages)
    assert heads.startswith("head_dims is not a field of Gemma3TextConfig")
    assert heads.endswith("did you mean head_dim?")
    assert images.startswith("image_sise_ is not a field of Gemma3Config")
    assert "did you mean" not in images
