"""Jobs whose model is a repository of a hub on this machine: downloads, commits, resumed jobs, no network, and errors."""

import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.hub_server import TOKEN, hub_server, use_hub
from tests.support.jobs import Job, output, run_titanplans
from tests.support.paths import ROOT
from tests.support.programs import run_python
from titanplans import modeling
from titanplans.cli.main import main
from titanplans.training.checkpoint.manifest import read_manifest
from titanplans.training.data.vocabulary import default_tokenizer_path

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}
IN_HF = "--checkpoint.initial_load_in_hf"
ASSETS = "model.hf_assets_path"
NAMED = (IN_HF, f"--{ASSETS}=ada/tiny")
OFFLINE = "offline"


def on_hub(arguments):
    """Run titanplans with the address and the cache that the file hub.json in the current folder names."""
    from huggingface_hub import constants

    settings = json.loads(Path("hub.json").read_text())
    use_hub(setattr, settings["address"], settings["cache"])
    os.environ["HF_TOKEN"] = TOKEN
    constants.HF_HUB_OFFLINE = OFFLINE in settings
    run_titanplans(arguments)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the folder of a tiny Qwen3 and its tokenizer, with weights in several files."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "config.json").write_text(json.dumps(QWEN3))
    torch.manual_seed(1)
    model = modeling.build_real(modeling.load_config_file(folder / "config.json"))
    model.save_pretrained(folder, max_shard_size="200KB")
    for file in Path(default_tokenizer_path()).iterdir():
        shutil.copy(file, folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch, published):
    with hub_server() as hub:
        hub.publish("ada/tiny", published)
        (tmp_path / "hub.json").write_text(
            json.dumps({"address": hub.address, "cache": str(tmp_path / "cache")})
        )
        use_hub(monkeypatch.setattr, hub.address, tmp_path / "cache")
        yield hub


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    toml = (tmp_path / "job.toml").read_text().replace('[model]\nconfig = "gla.json"\n', "")
    (tmp_path / "job.toml").write_text(toml.replace("steps = 100000", "steps = 2"))
    return job


def commit_of(hub) -> str:
    return hub.revisions["ada/tiny", "main"]


def test_train_py_downloads_a_repository_once_and_trains_as_with_its_folder(hub, job, published):
    env = {"HF_ENDPOINT": hub.address, "HF_HOME": str(job.folder / "home"), "HF_TOKEN": TOKEN}
    trained = run_python(ROOT / "train.py", "job.toml", *NAMED, cwd=job.folder, env=env)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    named = f"ada/tiny@{commit_of(hub)}"
    assert f"{ASSETS}: ada/tiny at commit {commit_of(hub)}, in {job.folder}/home/hub/" in trained.stdout
    assert read_manifest(job.folder / "out" / "checkpoint" / "step-2").job[ASSETS] == named
    needed = [path.name for path in published.iterdir() if path.suffix != ".bin"]
    assert Counter(hub.downloads) == Counter(needed)
    assert len(needed) > 5, "the weights are in several files"
    losses = re.findall(r"step +(\d+)  loss +([\d.]+)", trained.stdout)
    folder = ("--job.dump_folder=other", IN_HF, f"--{ASSETS}={published}")
    assert job.run(*folder) == 0, job.err
    assert job.losses == [(int(step), loss) for step, loss in losses]
    assert len(hub.downloads) == len(needed)


def test_under_torchrun_one_rank_downloads(hub, job, published):
    env = {"HF_ENDPOINT": hub.address, "HF_HOME": str(job.folder / "home"), "HF_TOKEN": TOKEN}
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ROOT / "train.py")
    trained = run_python(*launch, "job.toml", *NAMED, cwd=job.folder, env=env)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert max(Counter(hub.downloads).values()) == 1
    refused = run_python(*launch, "job.toml", IN_HF, f"--{ASSETS}=ada/none", cwd=job.folder, env=env)
    assert refused.returncode == 1
    assert f'error: {ASSETS} = "ada/none": there is no such folder' in refused.stderr
    assert "titanplans/hub.py" not in refused.stderr, "torchrun's own traceback is the only one"


def test_a_resumed_job_has_the_commit_that_it_began_with(hub, job, published, tmp_path):
    options = (*NAMED, "--checkpoint.no-last_save_model_only")
    first = commit_of(hub)
    assert job.run(*options, entry=on_hub) == 0, job.err
    changed = tmp_path / "changed"
    shutil.copytree(published, changed)
    (changed / "tokenizer.json").write_text("{}")
    assert hub.publish("ada/tiny", changed) != first
    assert job.run(*options, "--training.steps=3", entry=on_hub) == 0, job.err
    assert [step for step, _ in job.losses] == [3]
    assert f"ada/tiny at commit {first}" in job.out
    assert read_manifest(job.folder / "out" / "checkpoint" / "step-3").job[ASSETS] == f"ada/tiny@{first}"
    # A finished job stays at its commit, unless an option names a revision.
    assert job.run(*options, "--training.steps=3", entry=on_hub) == 0, job.err
    assert "is finished" in job.out
    assert job.run(IN_HF, f"--{ASSETS}=ada/tiny@main", entry=on_hub) == 2
    assert "tokenizer.json is not a tokenizer" in job.err


def test_without_a_network_the_cache_is_enough(hub, job, monkeypatch, capsys):
    assert job.run(*NAMED, entry=on_hub) == 0, job.err
    losses = job.losses
    settings = json.loads((job.folder / "hub.json").read_text())
    (job.folder / "hub.json").write_text(json.dumps(settings | {OFFLINE: True}))
    evaluation = output(["evaluate", "job.toml", *NAMED, "--validation.steps=1"], job.folder, on_hub)
    assert "out/checkpoint/step-2" in evaluation
    assert f"ada/tiny at commit {commit_of(hub)}" in evaluation
    evaluation = output(
        ["evaluate", "job.toml", *NAMED, "--validation.steps=1", "--job.dump_folder=new"], job.folder, on_hub
    )
    assert f"snapshots/{commit_of(hub)}" in evaluation
    assert job.run(*NAMED, "--job.dump_folder=again", entry=on_hub) == 0, job.err
    assert job.losses == losses
    assert "the Hub can't be reached (HF_HUB_OFFLINE is set): the files of" in job.out
    assert job.run(IN_HF, f"--{ASSETS}=ada/none", "--job.dump_folder=none", entry=on_hub) == 2
    assert job.err.startswith(
        f'error: {ASSETS} = "ada/none": the Hub can\'t be reached (HF_HUB_OFFLINE is set)'
    )
    assert job.err.count("\n") == 1
    # The tokenizer of an export is that of the commit.
    step = job.folder / "out" / "checkpoint" / "step-2"
    use_hub(monkeypatch.setattr, "http://127.0.0.1:9", job.folder / "cache")
    assert main(["export", str(step), str(job.folder / "exported")]) == 0
    assert f"the tokenizer of {job.folder}/cache/models--ada--tiny/snapshots/" in capsys.readouterr().out
    assert (job.folder / "exported" / "tokenizer.json").is_file()


def test_weights_are_downloaded_only_if_the_job_loads_them(hub, job):
    options = ("--model.config=ada/tiny", f"--{ASSETS}=ada/tiny")
    assert job.run(*options, entry=on_hub) == 0, job.err
    assert not [name for name in hub.downloads if "safetensors" in name]
    assert "config.json" in hub.downloads
    # Wrong options are refused before the weights are downloaded.
    assert job.run(*NAMED, "--training.dataset_path=none.txt", "--job.dump_folder=b", entry=on_hub) == 2
    assert not [name for name in hub.downloads if "safetensors" in name]


def test_adapters_name_the_repository_and_its_commit(hub, job, monkeypatch):
    start = (IN_HF, "--checkpoint.initial_load_path=ada/tiny")
    assert job.run(*start, "--lora.rank=2", "--checkpoint.save_adapters_only", entry=on_hub) == 0, job.err
    step, adapter, merged = job.folder / "out" / "checkpoint" / "step-2", job.folder / "a", job.folder / "m"
    assert main(["export", str(step), str(adapter), "--adapter"]) == 0
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("ada/tiny", commit_of(hub))
    card = (adapter / "README.md").read_text()
    assert "base_model: ada/tiny\n" in card
    assert f'from_pretrained("ada/tiny", revision="{commit_of(hub)}")' in card
    for source, target in ((step, merged), (adapter, job.folder / "m2")):
        assert main(["export", str(source), str(target)]) == 0
    first, second = (load_file(job.folder / name / "model.safetensors") for name in ("m", "m2"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_commands_take_a_repository_as_a_folder(hub, job, monkeypatch, capsys):
    monkeypatch.chdir(job.folder)
    assert main(["import", "ada/tiny", "seed"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        f"ada/tiny, from {job.folder}/cache/models--ada--tiny/snapshots/{commit_of(hub)}; seed: "
    )
    assert main(["import", "ada/none", "other"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: import ada/none: there is no such folder, and no such repository"
    )
    assert main(["import", "none", "other"]) == 2
    assert "import none: there is no such folder; " in capsys.readouterr().err
    assert main(["verify", "ada/tiny", "--quick", "--tp", "2"]) == 0
    assert "ada/tiny" in capsys.readouterr().out


def test_a_local_folder_has_precedence(hub, job, published):
    shutil.copytree(published, job.folder / "ada" / "tiny")
    assert job.run(*NAMED, entry=on_hub) == 0, job.err
    assert hub.downloads == []
    assert "at commit" not in job.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((f"--{ASSETS}=ada/none", IN_HF), f'{ASSETS} = "ada/none": there is no such folder, and no such repository'),
        ((f"--{ASSETS}=ada/tiny@v9", IN_HF), f'{ASSETS} = "ada/tiny@v9": the repository has no revision \'v9\'; '),
        ((f"--{ASSETS}=ada/gated", IN_HF), f'{ASSETS} = "ada/gated": the repository is gated; accept its conditions'),
        ((f"--{ASSETS}=ada/bare",), f'{ASSETS} = "ada/bare": the repository has no tokenizer.json at commit'),
        (("--model.config=ada/none",), 'model.config = "ada/none": there is no such folder'),
        (
            (IN_HF, "--checkpoint.initial_load_path=ada/none"),
            'checkpoint.initial_load_path = "ada/none": there is no such folder',
        ),
        ((f"--{ASSETS}=nowhere",), "hf_assets_path = 'nowhere': no tokenizer.json can be read there"),
        (("--checkpoint.initial_load_path=ada/none",), '"ada/none" is not a checkpoint'),
    ],
)  # fmt: skip
def test_errors_are_one_line(hub, job, published, tmp_path, monkeypatch, capsys, options, message):
    (tmp_path / "bare").mkdir()
    shutil.copy(published / "config.json", tmp_path / "bare")
    hub.publish("ada/bare", tmp_path / "bare")
    hub.publish("ada/gated", published)
    hub.gated.add("ada/gated")
    monkeypatch.chdir(job.folder)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert main(["train", "job.toml", *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
