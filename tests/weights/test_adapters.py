"""Adapters in files of peft: a split model saves, loads and merges them, and peft loads them."""

import functools
import json
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import zoo
from tests.support import process_groups
from tests.support.system import largest_file
from titanplans import modeling
from titanplans.errors import ModelError, NotSaved
from titanplans.parallel import (
    Degrees,
    FSDP2Config,
    LoRA,
    Mesh,
    ParallelManager,
    add_adapters,
    parallelize,
)
from titanplans.weights.adapters import (
    CONFIG,
    WEIGHTS,
    adapter_options,
    load_adapter,
    save_adapter,
    trained_names,
)
from titanplans.weights.merged import full_tensors

IDS = torch.arange(16).reshape(2, 8) * 5 % 96
MODELS = {
    "qwen3": (
        dict(num_key_value_heads=1, num_hidden_layers=1, intermediate_size=45, tie_word_embeddings=False),
        LoRA(rank=3, alpha=5, exclude_modules=("v_proj",), modules_to_save=("lm_head", "model.norm")),
    ),
    "phi3": (dict(num_hidden_layers=1), LoRA(rank=4, dropout=0.1)),
    "gpt2": ({}, LoRA(rank=2, target_modules=("c_attn", "c_proj"))),
}


def unsplit(name, seed=0):
    """Return a model on the CPU with adapters that change its outputs."""
    fields, options = MODELS[name]
    model = zoo.build(name, dtype=torch.float32, **fields)
    add_adapters(model, options)
    if seed is not None:
        for key, param in model.named_parameters():
            if param.requires_grad:
                generator = torch.Generator().manual_seed(seed + len(key))
                param.data.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def by_peft(base: nn.Module, folder: Path) -> torch.Tensor:
    return logits(peft.PeftModel.from_pretrained(base, folder))


def _over_ranks(rank: int, folder: str) -> dict[str, float]:
    """Save, load and merge adapters on four ranks; return the errors of the logits."""
    errors = {}
    for name in MODELS:
        fields, _ = MODELS[name]
        path = Path(folder) / name
        expected = logits(unsplit(name))
        model = unsplit(name)
        config = FSDP2Config(disable_loss_parallel=True, activation_checkpoint={"mode": "full"})
        parallelize(model, parallel_dims=Mesh(Degrees(tp=2), "cpu"), config=config)
        model.eval()
        logits(model)  # leaves the root module gathered
        save_adapter(model, path, base_model="base")
        merged = {name: tensor.read() for name, tensor in full_tensors([model]).items()}
        split = unsplit(name, seed=5)
        parallelize(split, parallel_dims=Mesh(Degrees(tp=4), "cpu"), config=config)
        load_adapter(split, path)
        errors[f"{name} read back"] = float((logits(split) - expected).abs().max())
        if rank == 0:
            plain = zoo.build(name, dtype=torch.float32, **fields)
            errors[f"{name} by peft"] = float((by_peft(plain, path) - expected).abs().max())
            plain = zoo.build(name, dtype=torch.float32, **fields)
            missing = plain.load_state_dict(merged, strict=False)
            assert not missing.unexpected_keys, missing
            assert all("lm_head" in key for key in missing.missing_keys), missing
            errors[f"{name} merged"] = float((logits(plain) - expected).abs().max())
        dist.barrier()
    return errors


def test_peft_loads_adapters_saved_from_a_split_model(tmp_path):
    errors = process_groups.run(functools.partial(_over_ranks, folder=str(tmp_path)), 4)
    assert len(errors) == 9
    assert max(errors.values()) < 1e-4, errors
    config = json.loads((tmp_path / "qwen3" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == "base"
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj"]
    assert config["modules_to_save"] == ["lm_head", "model.norm"]
    assert adapter_options(tmp_path / "phi3").dropout == 0.1


def test_adapters_saved_by_peft_are_loaded(tmp_path):
    fields, _ = MODELS["qwen3"]
    base = zoo.build("qwen3", dtype=torch.float32, **fields)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(base, config)
    theirs.save_pretrained(tmp_path)
    model = zoo.build("qwen3", dtype=torch.float32, **fields)
    add_adapters(model, adapter_options(tmp_path))
    load_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=0, atol=1e-5)


def gathered_in_float8(rank):
    """Return the names of the tensors in the adapter file of a model whose weights FSDP2 gathers in float8."""
    manager = ParallelManager(
        FSDP2Config(
            float8={
                "recipe_name": "tensorwise",
                "emulate": True,
                "enable_fsdp_float8_all_gather": True,
                "filter_fqns": ["lm_head"],
            },
            lora={"rank": 2, "target_modules": ["q_proj"], "modules_to_save": ["layers.1.mlp.down_proj"]},
        )
    )
    model = manager.parallelize(zoo.build("qwen3", dtype=torch.float32))
    return [name for name in trained_names(model) if "lora_" not in name]


def test_weights_gathered_in_float8_are_saved():
    assert process_groups.run(gathered_in_float8, 2) == ["model.layers.1.mlp.down_proj.weight"]


def test_a_full_disk_is_one_sentence(tmp_path):
    with (
        largest_file(10_000),
        pytest.raises(NotSaved, match=r"adapter can't be written \(File too large\)"),
    ):
        save_adapter(unsplit("qwen3"), tmp_path / "adapter")


def test_files_of_other_adapters_are_refused_with_all_differences(tmp_path):
    model = unsplit("qwen3")
    save_adapter(model, tmp_path)
    fields, _ = MODELS["qwen3"]
    other_model = modeling.build(zoo.config("qwen3", **fields))
    add_adapters(other_model, LoRA(rank=3, alpha=5, target_modules=("q_proj", "v_proj")))
    with pytest.raises(ModelError, match=r"2 tensors missing .*v_proj.lora_A.*; 12 tensors unexpected"):
        load_adapter(other_model, tmp_path)
    other_model = modeling.build(zoo.config("qwen3", **fields))
    add_adapters(other_model, LoRA(rank=2))
    with pytest.raises(ModelError, match=r"r = 3 and lora_alpha = 5, .* rank 2 and alpha 2"):
        load_adapter(other_model, tmp_path)
    values = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(values | {"use_dora": True}))
    with pytest.raises(ModelError, match=r"has use_dora = true, .* false"):
        adapter_options(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(values | {"alora_invocation_tokens": [1, 2]}))
    with pytest.raises(ModelError, match=r"has alora_invocation_tokens = \[1, 2\]"):
        adapter_options(tmp_path)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ModelError, match=r"is not an adapter_config.json of peft"):
        adapter_options(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(values))
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:100])
    with pytest.raises(ModelError, match="is damaged"):
        load_adapter(model, tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model.safetensors; a pickled"):
        load_adapter(model, tmp_path)
    with pytest.raises(ModelError, match="the model has no adapters"):
        save_adapter(modeling.build(zoo.config("qwen3")), tmp_path)
