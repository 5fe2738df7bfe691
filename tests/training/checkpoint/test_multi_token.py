"""Layers of multi-token prediction: import, jobs and export keep their tensors bit by bit, although no model has them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.jobs import Job
from titanplans import kernels, modeling
from titanplans.cli.main import main
from titanplans.errors import ModelError
from titanplans.training.checkpoint.manifest import damage, read_manifest
from titanplans.training.checkpoint.multi_token import FILE, MultiTokenLayers, write_layers
from titanplans.training.data.vocabulary import default_tokenizer_path
from titanplans.weights.folder import INDEX, SINGLE, open_folder
from titanplans.weights.load import load_weights

SIZES = {
    "glm4_moe": {"num_hidden_layers": 2, "num_mtp_layers": 1},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
NAMES = {
    "glm4_moe": [
        *("eh_proj.weight", "enorm.weight", "embed_tokens.weight", "mlp.experts.0.gate_proj.weight"),
        *("mlp.gate.e_score_correction_bias", "self_attn.q_proj.weight", "shared_head.norm.weight"),
    ],
    "qwen3_next": ["fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.experts.0.up_proj.weight", "norm.weight"],
}  # fmt: skip
PREFIXES = {"glm4_moe": "model.layers.2.", "qwen3_next": "mtp."}
IN_HF = "--checkpoint.initial_load_in_hf"
KEPT = "tensors of multi-token prediction are kept unchanged, and not trained"


def layers_of(family: str) -> dict[str, torch.Tensor]:
    """Return tensors of several shapes and dtypes, by their names in a folder."""
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    return {
        f"{PREFIXES[family]}{name}": torch.randn(3 + i, 5).to(dtypes[i % 3])
        for i, name in enumerate(NAMES[family])
    }


def folder_of(path: Path, family: str) -> dict[str, torch.Tensor]:
    """Write a folder with a tiny model, a tokenizer and a layer of multi-token prediction; return the layer's tensors."""
    kernels.install("cpu")
    torch.manual_seed(1)
    modeling.build_real(modeling.load_config(family, "debug", **SIZES[family])).save_pretrained(path)
    shutil.copy(Path(default_tokenizer_path()) / "tokenizer.json", path)
    weights, layers = load_file(path / SINGLE), layers_of(family)
    (path / SINGLE).unlink()
    files = {"model-1.safetensors": weights, "model-2.safetensors": layers}
    for name, tensors in files.items():
        save_file(tensors, path / name)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return layers


@pytest.fixture(scope="module", params=SIZES)
def published(request, tmp_path_factory):
    """Return a folder and the tensors of its layer of multi-token prediction."""
    path = tmp_path_factory.mktemp(request.param) / "published"
    return path, folder_of(path, request.param)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    path = tmp_path_factory.mktemp("glm") / "published"
    return path, folder_of(path, "glm4_moe")


def check_same(layers: dict[str, torch.Tensor], folder: Path) -> None:
    """Check that a folder has the layers bit by bit, and that its other tensors are the weights of a model."""
    tensors = {name: lazy.read() for name, lazy in open_folder(folder).tensors.items()}
    for name, value in layers.items():
        assert tensors[name].dtype == value.dtype, name
        assert torch.equal(tensors[name], value), name
    model = modeling.build_real(modeling.load_config_file(folder))
    assert set(load_weights(model, folder).unexpected) == set(layers)


def test_import_and_export_keep_them(published, tmp_path, capsys):
    source, layers = published
    seed, exported, sharded = tmp_path / "step-0", tmp_path / "exported", tmp_path / "sharded"
    assert main(["import", str(source), str(seed), "--dtype", "bfloat16"]) == 0
    assert f"{len(layers)} {KEPT}" in capsys.readouterr().out
    assert FILE in read_manifest(seed).files
    assert damage(seed) is None
    assert main(["export", str(seed), str(exported)]) == 0
    assert f"{len(layers)} {KEPT}" in capsys.readouterr().out
    check_same(layers, exported)
    assert main(["export", str(seed), str(sharded), "--max-shard-size", "100KB"]) == 0
    check_same(layers, sharded)
    assert json.loads((sharded / INDEX).read_text())["weight_map"].keys() >= layers.keys()
    (seed / FILE).write_bytes((seed / FILE).read_bytes()[:-1])
    assert main(["export", str(seed), str(tmp_path / "again")]) == 2
    assert f"{FILE} has" in capsys.readouterr().err


def test_load_weights_names_them(published, caplog):
    source, layers = published
    model = modeling.build_real(modeling.load_config_file(source))
    with caplog.at_level("INFO"):
        assert set(load_weights(model, source).unexpected) == set(layers)
    assert f"{len(layers)} tensors of multi-token prediction, which are not trained" in caplog.text


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    toml = (tmp_path / "job.toml").read_text().replace('[model]\nconfig = "gla.json"\n', "")
    toml = toml.replace("steps = 100000", "steps = 2").replace("interval = 5", "interval = 1")
    (tmp_path / "job.toml").write_text(toml)
    return job


def test_a_job_keeps_them_once_on_the_disk_and_exports_them(published, job):
    source, layers = published
    start = (IN_HF, f"--checkpoint.initial_load_path={source}", "--checkpoint.keep_latest_k=2")
    assert job.run(*start, "--checkpoint.no-last_save_model_only") == 0, job.err
    assert job.out.count(f"{len(layers)} {KEPT}") == 1
    shutil.move(
        source / "model-2.safetensors", source / "moved"
    )  # a resumed job no longer needs the weights of this folder
    try:
        assert job.run(*start, "--training.steps=4") == 0, job.err
    finally:
        shutil.move(source / "moved", source / "model-2.safetensors")
    assert job.out.count(f"{len(layers)} {KEPT}") == 1
    assert job.steps == [3, 4]
    checkpoints = [job.folder / "out" / "checkpoint" / f"step-{step}" for step in (3, 4)]
    assert len({os.stat(checkpoint / FILE).st_ino for checkpoint in checkpoints}) == 1
    for checkpoint in checkpoints:
        assert damage(checkpoint) is None
        assert main(["export", str(checkpoint), str(job.folder / checkpoint.name)]) == 0
        check_same(layers, job.folder / checkpoint.name)


def test_a_job_from_a_seed_whose_last_step_is_a_folder(glm, job):
    source, layers = glm
    assert main(["import", str(source), str(job.folder / "seed")]) == 0
    start = ("--checkpoint.initial_load_path=seed", "--checkpoint.last_save_in_hf")
    model = (f"--model.config={source}", f"--model.hf_assets_path={source}")
    options = ("--checkpoint.export_dtype=bfloat16", "--checkpoint.async_mode=async")
    assert job.run(*start, *model, *options) == 0, job.err
    assert f"{len(layers)} {KEPT}" in job.out
    assert FILE in read_manifest(job.folder / "out" / "checkpoint" / "step-1").files
    assert damage(job.folder / "out" / "checkpoint" / "step-1") is None
    check_same(layers, job.folder / "out" / "checkpoint" / "step-2")


def test_adapters_get_them_from_the_base_weights(glm, job):
    source, layers = glm
    options = (
        IN_HF,
        f"--checkpoint.initial_load_path={source}",
        "--lora.rank=2",
        "--checkpoint.save_adapters_only",
    )
    options += ("--lora.target_modules=['q_proj']",)
    assert job.run(*options, "--checkpoint.no-last_save_model_only") == 0, job.err
    step = job.folder / "out" / "checkpoint" / "step-2"
    assert not (step / FILE).exists()
    assert main(["export", str(step), str(job.folder / "merged")]) == 0
    check_same(layers, job.folder / "merged")
    assert job.run(*options, "--training.steps=3", "--checkpoint.last_save_in_hf") == 0, job.err
    check_same(layers, job.folder / "out" / "checkpoint" / "step-3")


def test_a_file_system_without_links_gets_a_copy(glm, tmp_path, monkeypatch):
    source, layers = glm
    assert main(["import", str(source), str(tmp_path / "seed")]) == 0

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    expected = read_manifest(tmp_path / "seed").files[FILE]
    assert write_layers(MultiTokenLayers(tmp_path / "seed", tuple(layers)), tmp_path) == expected
    assert (tmp_path / FILE).read_bytes() == (tmp_path / "seed" / FILE).read_bytes()


def test_other_unknown_tensors_are_refused(glm, tmp_path):
    source, _ = glm
    shutil.copytree(source, tmp_path / "copy")
    index = json.loads((source / INDEX).read_text())
    save_file({"model.layers.3.enorm.weight": torch.ones(2)}, tmp_path / "copy" / "model-3.safetensors")
    index["weight_map"]["model.layers.3.enorm.weight"] = "model-3.safetensors"
    (tmp_path / "copy" / INDEX).write_text(json.dumps(index))
    model = modeling.build_real(modeling.load_config_file(source))
    with pytest.raises(ModelError, match=r"1 tensor unexpected \(model\.layers\.3\.enorm\.weight\)"):
        load_weights(model, tmp_path / "copy")
