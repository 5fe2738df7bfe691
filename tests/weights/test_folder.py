"""Hugging Face folders that are damaged, incomplete, hostile or of another model are refused, and their code never runs."""

import contextlib
import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.support import refusals
from tests.support.tiny_model import Tiny
from titanplans import modeling
from titanplans.errors import ModelError
from titanplans.weights.folder import open_folder
from titanplans.weights.load import load_weights

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    tie_word_embeddings=True,
)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WithoutConfig(Tiny):
    """A user's model without a config."""

    def __init__(self):
        super().__init__(tied=True)
        del self.config


def model(config=CONFIG):
    built = modeling.build(config)
    return built.to_empty(device="cpu")


@pytest.fixture
def values():
    torch.manual_seed(0)
    names = {name: tensor.shape for name, tensor in modeling.build(CONFIG).state_dict().items()}
    return {name: torch.randn(shape) for name, shape in names.items() if name != "lm_head.weight"}


@pytest.fixture
def single(tmp_path, values):
    save_file(values, tmp_path / SINGLE)
    return tmp_path


@pytest.fixture
def many(tmp_path, values):
    """Return a folder with two files and an index."""
    (tmp_path := tmp_path / "many").mkdir()
    first = sorted(values)[: len(values) // 2]
    files = {
        "model-00001-of-00002.safetensors": {name: values[name] for name in first},
        "model-00002-of-00002.safetensors": {name: values[name] for name in values if name not in first},
    }
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def refusal(folder, built=None):
    return refusals.refusal(load_weights, built or model(), folder, kind=ModelError)


def change_index(folder: Path, change) -> dict:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))
    return index


def change_header(file: Path, change) -> None:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def test_one_file_and_several_have_the_same_values(single, many, values):
    for folder in (single, many):
        loaded = load_weights(built := model(), folder)
        assert all(torch.equal(built.state_dict()[name], value) for name, value in values.items())
        assert loaded.bytes_read == sum(4 * value.numel() for value in values.values())
        assert built.lm_head.weight is built.model.embed_tokens.weight


def test_values_are_cast_to_the_dtype_of_parameters(tmp_path, values):
    save_file({name: value.bfloat16() for name, value in values.items()}, tmp_path / SINGLE)
    load_weights(built := model(), tmp_path)
    for name, value in values.items():
        assert torch.equal(built.state_dict()[name], value.bfloat16().float()), name


def test_names_that_differ_are_reported_together(single, values):
    values["surplus.weight"] = torch.zeros(1)
    values["model.norm.weight"] = torch.zeros(17)
    for layer in range(2):
        del (
            values[f"model.layers.{layer}.mlp.up_proj.weight"],
            values[f"model.layers.{layer}.mlp.down_proj.weight"],
        )
    save_file(values, single / SINGLE)
    message, first, second = refusal(single), "model.layers.0.mlp", "model.layers.1.mlp"
    assert message.startswith(
        f"{single} does not hold the weights of this model, LlamaForCausalLM: 4 tensors "
    )
    assert (
        f"({first}.up_proj.weight, {first}.down_proj.weight, {second}.up_proj.weight and 1 more)" in message
    )
    assert "1 tensor unexpected (surplus.weight); 1 tensor of another shape" in message
    assert (
        "(model.norm.weight is (17,) of float32 in model.safetensors, expected (16,) of float32)" in message
    )
    built = model()
    before = built.model.layers[1].mlp.up_proj.weight.data.fill_(7.0).clone()
    values["model.norm.weight"] = torch.ones(16)
    save_file(values, single / SINGLE)
    loaded = load_weights(built, single, strict=False)
    assert (len(loaded.missing), loaded.unexpected) == (4, ("surplus.weight",))
    assert torch.equal(built.model.layers[1].mlp.up_proj.weight, before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_dtypes_are_refused(single, values, dtype):
    values["model.norm.weight"] = values["model.norm.weight"].to(dtype)
    save_file(values, single / SINGLE)
    message = refusal(single)
    assert f"(16,) of {str(dtype).removeprefix('torch.')}" in message
    assert "expected (16,) of float32" in message


def test_a_tied_head_may_have_either_name_and_both_only_if_equal(single, values):
    embedding = values["model.embed_tokens.weight"]
    save_file(values | {"lm_head.weight": embedding.clone()}, single / SINGLE)
    load_weights(built := model(), single)
    assert torch.equal(built.lm_head.weight, embedding)
    without_embedding = {name: value for name, value in values.items() if name != "model.embed_tokens.weight"}
    save_file(without_embedding | {"lm_head.weight": embedding}, single / SINGLE)
    load_weights(built := model(), single)
    assert torch.equal(built.model.embed_tokens.weight, embedding)
    save_file(values | {"lm_head.weight": embedding + 1}, single / SINGLE)
    assert "has lm_head.weight and model.embed_tokens.weight with different values" in refusal(single)
    save_file(without_embedding, single / SINGLE)
    assert "missing (model.embed_tokens.weight)" in refusal(single)


def test_tables_saved_by_old_releases_are_ignored(single, values):
    save_file(values | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, single / SINGLE)
    assert load_weights(model(), single).unexpected == ()


def test_a_model_without_memory_is_refused(single):
    assert "has no memory yet" in refusal(single, modeling.build(CONFIG))


def test_folders_without_weights_are_refused(tmp_path):
    assert "nowhere is not a directory" in refusal(tmp_path / "nowhere")
    assert refusal(tmp_path) == f"{tmp_path} holds neither {SINGLE} nor {INDEX}"


def test_pickles_are_not_read(tmp_path):
    class Runs:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    for name in ("pytorch_model.bin", "other.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Runs()))
    message = refusal(tmp_path)
    assert "holds its weights as pickles (other.pt, pytorch_model.bin)" in message
    assert "convert them to safetensors" in message
    (tmp_path / SINGLE).write_bytes(pickle.dumps(Runs()))
    assert "model.safetensors is damaged" in refusal(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "named", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", "", 7, "a\\b.safetensors"]
)
def test_an_index_does_not_leave_its_folder(many, named):
    index = json.loads((many / INDEX).read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = named
    (many / INDEX).write_text(json.dumps(index))
    assert f"says that {first} is in {named!r}: an index may name" in refusal(many)


def test_links_are_followed_as_the_hub_makes_them(many, tmp_path_factory, values):
    blobs = tmp_path_factory.mktemp("blobs")
    for file in list(many.glob("*.safetensors")):
        file.rename(blobs / file.stem)
        file.symlink_to(blobs / file.stem)
    load_weights(built := model(), many)
    assert torch.equal(built.model.norm.weight, values["model.norm.weight"])
    file.unlink()
    file.symlink_to("/dev/zero")
    assert f"{file} is not a regular file" in refusal(many)


def test_an_index_that_does_not_fit_its_files(many, values):
    first, second = sorted(file.name for file in many.glob("*.safetensors"))
    index = (many / INDEX).read_text()
    change_index(many, lambda index: index["weight_map"].update({"model.norm.weight": first}))
    assert f"names the wrong file for 1 tensor, e.g. {first} for model.norm.weight" in refusal(many)
    (many / INDEX).write_text(index)
    save_file(load_file(many / first) | {"model.norm.weight": values["model.norm.weight"]}, many / first)
    assert f"model.norm.weight is in {first} and in {second}" in refusal(many)
    (many / second).unlink()
    assert f"{second} does not exist" in refusal(many)
    save_file(values, many / SINGLE)
    assert "and an index of other files" in refusal(many)
    (many / SINGLE).unlink()
    for text, why in [
        ("", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "y.safetensors does not exist"),
    ]:
        (many / INDEX).write_text(text)
        assert why in refusal(many)


def test_truncated_files_are_refused_by_name(single):
    original = (single / SINGLE).read_bytes()
    too_large = struct.pack("<Q", 2**63) + original[8:]
    for content in (
        *(original[:n] for n in (0, 7, 8, 20, len(original) // 2, len(original) - 1)),
        original + b"x",
        too_large,
    ):
        (single / SINGLE).write_bytes(content)
        assert refusal(single).startswith(f"{single / SINGLE} is damaged or truncated"), len(content)


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0, 4]},
        {"data_offsets": [0, 64]},
        {"data_offsets": [10**9, 10**9 + 64]},
        {"data_offsets": [-64, 0]},
        {"shape": [-16]},
        {"shape": [2**40, 2**40]},
        {"dtype": "F6_E9"},
        None,
    ],
)
def test_wrong_headers_are_refused(single, entry):
    def change(header):
        header["model.norm.weight"] = entry and header["model.norm.weight"] | entry

    change_header(single / SINGLE, change)
    assert "is damaged or truncated" in refusal(single)


def test_a_dtype_that_no_model_has_is_refused(single):
    """safetensors supports the dtype U32, which has the size of float32."""
    change_header(single / SINGLE, lambda header: header["model.norm.weight"].update(dtype="U32"))
    assert "model.norm.weight has the dtype U32" in refusal(single)


def test_random_bytes_are_refused_in_one_sentence(single):
    original, generator = (single / SINGLE).read_bytes(), torch.Generator().manual_seed(0)
    for _ in range(30):
        content = bytearray(original)
        for position in torch.randint(0, 900, (3,), generator=generator).tolist():
            content[position] = int(torch.randint(0, 256, (1,), generator=generator))
        (single / SINGLE).write_bytes(content)
        with contextlib.suppress(ModelError):  # any other exception fails the test
            load_weights(model(), single)


def test_code_next_to_the_weights_is_not_run(single):
    config = CONFIG.to_dict() | {
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    }
    (single / "config.json").write_text(json.dumps(config))
    (single / "code.py").write_text(f"open({str(single / 'ran')!r}, 'w')")
    load_weights(model(modeling.load_config_file(single)), single)
    (single / "config.json").write_text(json.dumps(config | {"model_type": "theirs"}))
    with pytest.raises(ModelError, match="code from a hub is never run"):
        modeling.load_config_file(single)
    assert not (single / "ran").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(single):
    (single / SINGLE).chmod(0)
    assert "can't be read: Permission denied" in refusal(single)


def test_a_slice_of_a_tensor_is_read_by_itself(single, values):
    folder = open_folder(single)
    lazy_slice = folder.tensors["model.embed_tokens.weight"].narrow(0, 3, 4).narrow(1, 2, 5)
    assert torch.equal(lazy_slice.read(), values["model.embed_tokens.weight"][3:7, 2:7])
    assert folder.bytes_read == 4 * 4 * 5


def test_a_model_of_the_user(tmp_path):
    """A model whose weights have names that are in no table of renamed weights."""
    config = modeling.user_model_config(f"{__name__}:WithoutConfig", {})
    built = modeling.build(config)
    tied = built.all_tied_weights_keys
    built.to_empty(device="cpu")
    values = {name: torch.randn_like(value) for name, value in built.state_dict().items()}
    save_file({name: value for name, value in values.items() if name not in tied}, tmp_path / SINGLE)
    load_weights(built, tmp_path)
    for name, value in built.state_dict().items():
        assert torch.equal(value, values[tied.get(name, name)]), name


@pytest.mark.parametrize(("family", "layer"), [("glm4_moe", 46), ("deepseek_v3", 61)])
def test_layers_of_multi_token_prediction_are_named(tmp_path, caplog, family, layer):
    built = modeling.build_real(modeling.load_config(family, "debug"), dtype=torch.float32)
    built.save_pretrained(tmp_path)
    extra = (f"model.layers.{layer}.eh_proj.weight", f"model.layers.{layer}.enorm.weight")
    values = load_file(tmp_path / SINGLE)
    save_file(values | {name: torch.ones(4) for name in extra}, tmp_path / SINGLE)
    with caplog.at_level("INFO"):
        loaded = load_weights(model(built.config), tmp_path)
    assert loaded.unexpected == extra
    assert "2 tensors of multi-token prediction, which are not trained" in caplog.text
    assert all(name in caplog.text for name in extra)
