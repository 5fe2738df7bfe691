"""Weights whose names are not those of the module tree: the hub's names, and names of older flash-linear-attention."""

import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from tests import zoo
from tests.support.refusals import refusal
from titanplans import load_weights, modeling
from titanplans.errors import ModelError
from titanplans.weights.names import multi_token_names


def packed(state):
    for name in [name for name in state if name.endswith("mlp.up_proj.weight")]:
        gate = name.replace("up_proj", "gate_proj")
        state[gate] = torch.cat([state[gate], state.pop(name)])


def mixes(state):
    for layer in range(2):
        old = [state.pop(f"model.layers.{layer}.attn.x_{each}").squeeze(0) for each in "rwkvag"]
        state[f"model.layers.{layer}.attn.x_x"] = torch.cat(old)


def experts(state):
    for name in [name for name in state if ".experts." in name]:
        block = name.partition(".mlp.")[0] + ".block_sparse_moe.experts"
        for index, expert in enumerate(state.pop(name)):
            if name.endswith("down_proj"):
                state[f"{block}.{index}.w2.weight"] = expert.clone()
            else:
                gate, up = expert.chunk(2)
                state |= {
                    f"{block}.{index}.w1.weight": gate.clone(),
                    f"{block}.{index}.w3.weight": up.clone(),
                }
    renamed((".mlp.gate.", ".block_sparse_moe.gate."))(state)


def renamed(*pairs):
    def rename(state):
        for new, old in pairs:
            for name in [name for name in state if new in name]:
                state[name.replace(new, old)] = state.pop(name)

    return rename


CASES = {
    "mixtral": experts,
    "gpt_neox": renamed(("lm_head.", "embed_out.")),
    "gemma3": renamed(
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    "gla": packed,
    "transformer": packed,
    "forgetting_transformer": renamed((".f_proj.", ".g_proj.")),
    "rwkv7": mixes,
    "mamba2": renamed(("backbone.embeddings.", "backbone.embedding.")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_folder_with_other_names_is_loaded(name, tmp_path):
    options = {"use_output_gate": False} if name == "forgetting_transformer" else {}
    model = zoo.build(name, dtype=torch.float32, **options)
    expected = model.state_dict()
    tied = model.all_tied_weights_keys
    state = {key: value.clone() for key, value in expected.items() if key not in tied}
    CASES[name](state)
    assert state.keys() != expected.keys()
    save_file(state, tmp_path / "model.safetensors")
    built = modeling.build(model.config).to_empty(device="cpu")
    loaded = load_weights(built, tmp_path)
    assert {
        key for key, value in built.state_dict().items() if not torch.equal(value, expected[key])
    } == set()
    assert loaded.bytes_read == sum(4 * value.numel() for value in state.values())


def test_a_missing_tensor_is_reported(tmp_path):
    """A folder with current names is not read as a folder with old names."""
    model = zoo.build("gla", dtype=torch.float32)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 tensor missing \(\S*1\.mlp\.up_proj\.weight\)"):
        load_weights(modeling.build(model.config).to_empty(device="cpu"), tmp_path)


def mixtral(folder, change):
    """Save a mixture of experts in the hub's form, after `change(state)`; return the error of loading it."""
    model = zoo.build("mixtral", dtype=torch.float32)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    experts(state)
    change(state)
    save_file(state, folder / "model.safetensors")
    message = refusal(
        load_weights, modeling.build(model.config).to_empty(device="cpu"), folder, kind=ModelError
    )
    return message


def test_experts_that_are_missing_or_do_not_fit_are_refused(tmp_path):
    block = "model.layers.0.block_sparse_moe.experts"
    message = mixtral(tmp_path, lambda state: state.pop(f"{block}.2.w3.weight"))
    assert f"{block}.0.w3.weight ... {block}.3.w3.weight has the shape (3, 48, 64)" in message
    assert f"{block}.0.w1.weight ... {block}.3.w1.weight (4, 48, 64)" in message
    message = mixtral(tmp_path, lambda state: state.pop(f"{block}.3.w2.weight"))
    assert "model.layers.0.mlp.experts.down_proj is (3, 64, 48) of float32" in message
    assert "expected (4, 64, 48) of float32" in message
    message = mixtral(tmp_path, lambda state: state.update({f"{block}.1.w2.weight": torch.zeros(3, 3)}))
    assert f"{block}.1.w2.weight has the shape (3, 3) and {block}.0.w2.weight (64, 48)" in message


def test_two_names_for_one_tensor_are_refused(tmp_path):
    message = mixtral(
        tmp_path, lambda state: state.update({"model.layers.0.mlp.gate.weight": torch.zeros(4, 64)})
    )
    assert "are both named model.layers.0.mlp.gate.weight" in message


@pytest.mark.parametrize(
    ("model_type", "names", "others"),
    [
        ("deepseek_v3", ["model.layers.61.eh_proj.weight"], ["model.layers.62.enorm.weight"]),
        ("glm4_moe", ["model.layers.46.shared_head.head.weight"], ["model.layers.47.enorm.weight"]),
        ("mimo_v2_flash", ["model.mtp.layers.0.eh_proj.weight"], ["model.layers.48.mlp.up_proj.weight"]),
        ("qwen3_next", ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"], ["lm_head.bias"]),
        ("qwen3_5_text", ["mtp.pre_fc_norm_hidden.weight"], ["model.visual.blocks.0.norm1.weight"]),
        ("ernie4_5_moe", ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"], []),
        ("hy_v4", ["model.mtp_layers.0.enorm.weight"], []),
    ],
)
def test_names_of_multi_token_prediction(model_type, names, others):
    config = CONFIG_MAPPING[model_type]()
    patterns = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._keys_to_ignore_on_load_unexpected
    unexpected = [*names, *others]
    ignored = [name for name in unexpected if any(re.search(pattern, name) for pattern in patterns)]
    assert multi_token_names(SimpleNamespace(config=config), unexpected, ignored) == names
