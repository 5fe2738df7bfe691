"""Folders of older releases of flash-linear-attention: what was stored otherwise is read as it was meant."""

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


def renamed(new, old):
    def rename(state):
        for name in [name for name in state if new in name]:
            state[name.replace(new, old)] = state.pop(name)

    return rename


CASES = {
    "gla": packed,
    "transformer": packed,
    "forgetting_transformer": renamed(".f_proj.", ".g_proj."),
    "rwkv7": mixes,
    "mamba2": renamed("backbone.embeddings.", "backbone.embedding."),
}


@pytest.mark.parametrize("name", CASES)
def test_older_folders(name, tmp_path):
    options = {"use_output_gate": False} if name == "forgetting_transformer" else {}
    model = zoo.build(name, dtype=torch.float32, **options)
    expected = model.state_dict()
    state = {key: value.clone() for key, value in expected.items()}
    CASES[name](state)
    assert state.keys() != expected.keys()
    save_file(state, tmp_path / "model.safetensors")
    built = modeling.build(model.config).to_empty(device="cpu")
    loaded = load_weights(built, tmp_path)
    assert {
        key for key, value in built.state_dict().items() if not torch.equal(value, expected[key])
    } == set()
    assert loaded.bytes_read == sum(4 * value.numel() for value in expected.values())


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
