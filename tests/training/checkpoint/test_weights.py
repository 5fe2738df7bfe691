"""Jobs that start from a Hugging Face folder: model, tokenizer and weights, resumed jobs, and errors before the start."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support import process_groups
from tests.support.job_comparison import SAVES, TP
from tests.support.jobs import Job
from tests.support.refusals import refusal as said_of
from tests.support.step_comparison import full_copy
from tests.support.trained_jobs import logged_messages, train, write_inputs
from titanplans import kernels, modeling
from titanplans.cli.main import main
from titanplans.config import load_job
from titanplans.training.data.vocabulary import default_tokenizer_path


def save_hugging_face(config: Path, folder: Path) -> None:
    """Save a tokenizer, and with transformers a model of this config.json, in `folder`."""
    kernels.install("cpu")
    modeling.build_real(modeling.load_config_file(config)).save_pretrained(folder)
    shutil.copy(Path(default_tokenizer_path()) / "tokenizer.json", folder)


def starts(rank: int, folder: Path) -> dict:
    """Return a job's weights before its first step on two ranks, its losses, and its losses after it is resumed for
    longer."""
    results = {}
    published = folder / "published"
    start = (f"--checkpoint.initial_load_path={published}", "--checkpoint.initial_load_in_hf")

    def look(trainer):
        trainer.checkpointer.load()
        results["weights"] = {
            name: full_copy(x) for name, x in trainer.model_parts[0].lm.state_dict().items()
        }

    job = (folder, "dense", "start", TP, *SAVES, *start)
    results["losses"] = train(*job, "--training.steps=4", prepare=look)[0].losses()
    with logged_messages() as results["said"]:
        results["prolonged"] = train(*job, "--training.steps=6")[0].losses()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_inputs(tmp_path_factory.mktemp("weights"))
    save_hugging_face(folder / "dense.json", folder / "published")
    return folder


@pytest.fixture(scope="module")
def started(folder):
    return process_groups.run(functools.partial(starts, folder=folder), ranks=2)


def test_a_job_starts_with_the_weights_of_the_folder(started, folder):
    expected = AutoModelForCausalLM.from_pretrained(folder / "published", dtype=torch.float32).state_dict()
    assert started["weights"].keys() == expected.keys()
    assert [name for name in expected if not torch.equal(expected[name], started["weights"][name])] == []


def test_a_checkpoint_takes_precedence_over_the_folder(started):
    assert list(started["losses"]) == [1, 2, 3, 4]
    assert list(started["prolonged"]) == [5, 6]
    assert not any("read 20 tensors" in line for line in started["said"])


# ---------------------------------------------------------------- from the command line


@pytest.fixture
def job(tmp_path):
    """Return a job whose model is a Hugging Face folder."""
    job = Job(tmp_path)
    save_hugging_face(tmp_path / "gla.json", tmp_path / "gla")
    toml = (tmp_path / "job.toml").read_text().replace('[model]\nconfig = "gla.json"\n', "")
    toml = toml.replace("interval = 5", 'interval = 5\ninitial_load_path = "gla"\ninitial_load_in_hf = true')
    (tmp_path / "job.toml").write_text(toml)
    return job


def test_a_job_needs_only_a_folder(job):
    assert job.run("--training.steps=2", "--checkpoint.enable") == 0, job.err
    assert "model from gla, tokenizer from gla" in job.out
    assert "bytes on this rank in" in job.out


def test_a_longer_context_than_that_of_the_weights(job, monkeypatch):
    monkeypatch.chdir(job.folder)
    longer = "--model.config_overrides={max_position_embeddings = 4096}"
    options = ("--training.steps=2", "--lora.rank=2", "--checkpoint.save_adapters_only")
    assert job.run(*options, "--training.seq_len=3072") == 0, job.err
    assert "seq_len = 3072 exceeds the model's max_position_embeddings = 2048" in job.out
    assert job.run(*options, longer, "--job.dump_folder=longer", "--training.seq_len=3072") == 0, job.err
    assert "exceeds" not in job.out
    # The checkpoints in dump_folder are of the first job's model.
    assert refusal(job, *options, longer).endswith("name another folder, or return to that model")
    at = job.folder / "longer" / "checkpoint" / "step-2"
    assert main(["export", str(at), str(job.folder / "exported"), "--base", str(job.folder / "gla")]) == 0
    assert (
        json.loads((job.folder / "exported" / "config.json").read_text())["max_position_embeddings"] == 4096
    )
    start = (f"--checkpoint.initial_load_path={job.folder / 'exported'}", "--job.dump_folder=third")
    assert job.run("--training.steps=1", "--model.config=gla.json", longer, *start) == 0, job.err
    assert "(max_position_embeddings = 4096, now 2048)" in refusal(
        job, "--model.config=gla.json", *start[:1], "--job.dump_folder=fourth"
    )


def refusal(job, *options: str) -> str:
    """Return the error line of a job that is refused before its processes start."""
    from titanplans.training.job.checks import check_job

    return said_of(lambda: check_job(load_job([str(job.folder / "job.toml"), *options]), 2))


def test_folders_that_do_not_fit_are_refused_before_processes_start(job, monkeypatch):
    monkeypatch.chdir(job.folder)
    folder, file = job.folder / "gla", job.folder / "gla" / "model.safetensors"
    message = refusal(job, "--model.config=gla.json", "--checkpoint.initial_load_path=nowhere")
    assert message.startswith('checkpoint.initial_load_path = "nowhere"')
    assert "checkpoint.initial_load_in_hf = true" in message
    (job.folder / "other.json").write_text(
        json.dumps(json.loads((job.folder / "gla.json").read_text()) | {"num_heads": 2})
    )
    assert "differs from the model in gla (num_heads = 4, now 2)" in refusal(job, "--model.config=other.json")
    (folder / "tokenizer.json").rename(job.folder / "tokenizer.json")
    assert "no tokenizer.json can be read there (No such file" in refusal(job)
    refused = load_job([str(job.folder / "job.toml"), f"--model.hf_assets_path={job.folder}"])
    assert refused.model.hf_assets_path == str(job.folder)
    (job.folder / "tokenizer.json").rename(folder / "tokenizer.json")
    values = load_file(file)
    values["model.norm.weight"] = torch.zeros(31)
    save_file(values, file)
    message = refusal(job)
    assert "(model.norm.weight is (31,) of float32" in message
    assert "(32,) of float32)" in message
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors is damaged" in refusal(job)


def test_verify_takes_the_model_of_the_folder(job, monkeypatch, capsys):
    from titanplans.cli.main import main

    monkeypatch.chdir(job.folder)
    assert main(["verify", "job.toml", "--quick"]) == 0
    assert "job.toml: gla" in capsys.readouterr().out
