"""Names, flavors, published sizes, config files, and building on meta."""

from importlib.util import find_spec

import pytest
import torch
from transformers import CONFIG_MAPPING, BertConfig, LlamaConfig, ViTConfig

from tests.support import process_groups
from tests.support.refusals import refusal
from titanplans import modeling
from titanplans.modeling import ModelError
from titanplans.modeling.user_model import is_user_model

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def test_overrides_reach_the_model():
    model = modeling.build(modeling.load_config("gla", "debug", vocab_size=512, num_hidden_layers=1))
    assert model.get_input_embeddings().weight.shape == (512, 128)
    assert len(model.model.layers) == 1


def test_overrides_of_a_nested_config_go_where_the_field_is():
    config = modeling.load_config(
        "gemma3",
        "debug",
        vocab_size=512,
        num_hidden_layers=2,
        mm_tokens_per_image=1,
        tie_word_embeddings=False,
    )
    assert (config.text_config.vocab_size, config.text_config.num_hidden_layers) == (512, 2)
    assert config.mm_tokens_per_image == 1
    assert not hasattr(config, "vocab_size"), "fields of the text config are not set on the outer config"
    assert (config.tie_word_embeddings, config.text_config.tie_word_embeddings) == (False, False)
    assert modeling.build(config).lm_head.weight.shape == (512, 128)


def test_a_nested_override_changes_only_its_fields():
    before = modeling.load_config("gemma3", "debug")
    config = modeling.load_config(
        "gemma3", "debug", vision_config={"num_hidden_layers": 1}, text_config={"sliding_window": 4}
    )
    assert (config.vision_config.num_hidden_layers, config.text_config.sliding_window) == (1, 4)
    config.vision_config.num_hidden_layers, config.text_config.sliding_window = 2, 8
    assert config.to_dict() == before.to_dict()


@pytest.mark.parametrize(
    "name", sorted(name for name, flavors in modeling.available().items() if "debug" in flavors)
)
def test_an_adjusted_config_differs_only_in_the_named_fields(name):
    config = modeling.load_config(name, "debug")
    if is_user_model(config):
        return
    before, text = config.to_dict(), config.get_text_config()
    of_text = before if text is config else before["text_config"]
    field = next((f for f in ("max_position_embeddings", "n_positions") if f in of_text), None)
    assert modeling.adjusted(config, {}).to_dict() == before
    if field is not None:
        after = modeling.adjusted(config, {field: 77}).to_dict()
        of_text[field] = 77
        assert after == before


def test_an_override_of_rope_parameters_keeps_the_others():
    config = modeling.load_config("gemma3", "debug")
    both = modeling.adjusted(config, {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}).text_config
    assert both.rope_parameters == {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 7.0},
    }
    assert config.text_config.rope_parameters["full_attention"]["rope_theta"] == 1000000.0
    for overrides, fragments in [
        ({"rope_theta": 7.0}, "has no field 'rope_theta'"),
        ({"attention_dropout": 2.0}, "from 0 to 1"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "above 0"),
    ]:
        with pytest.raises(ModelError, match=rf"^model.config_overrides = .*{fragments}"):
            modeling.adjusted(config, overrides)


def test_an_override_does_not_change_the_flavor():
    rope = {"full_attention": {"rope_type": "default"}}
    config = modeling.load_config("gemma3_text", "1B", rope_parameters=rope)
    assert rope == {"full_attention": {"rope_type": "default"}}
    config.rope_parameters["full_attention"]["rope_theta"] = 7.0
    fresh = modeling.load_config("gemma3_text", "1B")
    fresh.rope_parameters["sliding_attention"]["rope_theta"] = 7.0
    assert modeling.load_config("gemma3_text", "1B").rope_parameters == {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    }


@pytest.mark.parametrize(
    ("arguments", "overrides", "fragments"),
    [
        (("glaa", "debug"), {}, ["'glaa'", "did you mean gla?"]),
        (("gla", "350M"), {}, ["'350M'", "did you mean 340M?"]),
        (("gla", "debug"), {"hiden_size": 64}, ["hiden_size", "did you mean hidden_size?"]),
        (("llama", "debug"), {"num_attn_heads": 4}, ["LlamaConfig", "did you mean num_attention_heads?"]),
        (("llama", "debug"), {"dtype": "float16"}, ["LlamaConfig", "dtype"]),
        (("qwen3", "debug"), {"hidden_size": "wide"}, ["hidden_size", "wide"]),
        (("gemma3", "debug"), {"vocb_size": 8}, ["Gemma3Config", "did you mean vocab_size?"]),
        (("gemma3", "debug"), {"text_config": {"layers": 1}}, ["Gemma3TextConfig", "layers"]),
        (
            ("gemma3", "debug"),
            {"vision_config": {"image": 1}},
            ["SiglipVisionConfig", "did you mean image_size?"],
        ),
        (("gla", "debug"), {"attn": {"layers": [9], "num_heads": 4}}, ["out-of-range layer 9"]),
    ],
)
def test_a_wrong_name_is_refused_in_one_line_with_a_suggestion(arguments, overrides, fragments):
    message = refusal(modeling.load_config, *arguments, **overrides, kind=ModelError)
    assert all(word in message for word in fragments)


@pytest.mark.parametrize("model_type", ["gla", "transformer", "llama", "gated_deltanet"])
def test_any_config_file_or_its_folder_loads(tmp_path, model_type):
    import fla.models  # noqa: F401  # registers its model types

    CONFIG_MAPPING[model_type](hidden_size=64, vocab_size=96).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        config = modeling.load_config_file(path)
        assert (config.model_type, config.hidden_size, config.vocab_size) == (model_type, 64, 96)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (None, ["config.json", "No such file"]),
        ('{"model_type": "gla",\n oops}', ["not JSON", "line 2"]),
        ("[1]", ["JSON object", "list"]),
        ('{"hidden_size": 3}', ["no 'model_type'"]),
        ('{"model_type": "lama"}', ["'lama'", "did you mean llama?"]),
        ('{"model_type": 3}', ["model_type 3"]),
        ('{"model_type": "llama", "hidden_size": "wide"}', ["hidden_size", "wide"]),
    ],
)
def test_a_bad_config_file_is_refused_in_one_line(tmp_path, text, fragments):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    message = refusal(modeling.load_config_file, path, kind=ModelError)
    assert all(word in message for word in fragments)


def test_parameters_have_the_default_dtype_not_that_of_the_config():
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=64, dtype="float16"
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = modeling.build(config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert config.dtype == torch.float16, "the caller's config was changed"
    assert config.use_cache
    assert not model.config.use_cache


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        (ViTConfig(), ["'vit'", "no causal language model"]),
        ({"num_heads": 8, "num_kv_heads": 3}, ["'transformer'", "num_heads must be divisible"]),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(config, fragments):
    if isinstance(config, dict):
        config = modeling.load_config("transformer", "debug", **config)
    message = refusal(modeling.build, config, kind=ModelError)
    assert all(word in message for word in fragments)


def test_an_encoder_with_a_language_model_head_builds():
    assert modeling.build(BertConfig(num_hidden_layers=1)).get_output_embeddings() is not None


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_softmax_attention_without_flash_attn_is_refused_with_a_remedy():
    # In a new process, because the CPU attention is installed in this one.
    assert "kernels.install('cpu')" in process_groups.run(build_transformer, 1)


def build_transformer(rank):
    return refusal(modeling.build, modeling.load_config("transformer", "debug"), kind=ModelError)
