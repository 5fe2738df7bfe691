"""Names that are not the module tree's: those of the hub, and of older releases of flash-linear-attention."""

import pytest
import torch
import zoo
from safetensors.torch import save_file

from titanplans import load_weights, modeling
from titanplans.errors import ModelError


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
        for number, expert in enumerate(state.pop(name)):
            if name.endswith("down_proj"):
                state[f"{block}.{number}.w2.weight"] = expert.clone()
            else:
                gate, up = expert.chunk(2)
                state |= {
                    f"{block}.{number}.w1.weight": gate.clone(),
                    f"{block}.{number}.w3.weight": up.clone(),
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
def test_a_folder_with_other_names(name, tmp_path):
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


def test_a_part_that_is_missing_is_told(tmp_path):
    """Of a folder of today's, which is not taken for an old one."""
    model = zoo.build("gla", dtype=torch.float32)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"1 tensor of the model not in it \(model\.layers\.1\.mlp\.up_proj\.weight\)"
    ):
        load_weights(modeling.build(model.config).to_empty(device="cpu"), tmp_path)
