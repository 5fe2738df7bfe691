"""Hugging Face folders of the last step, exported checkpoints, and imported folders have bit-identical weights."""

import contextlib
import json
import re
import shutil
import subprocess
import sys

import pytest
import tomli
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import zoo
from tests.support.hub_server import TOKEN, hub_server
from tests.support.jobs import Job, flip
from tests.support.refusals import refusal
from tests.support.resident_memory import peak, peak_without_files
from tests.support.system import largest_file
from titanplans import kernels, modeling
from titanplans.cli.main import main
from titanplans.config.schema import build_job
from titanplans.training.checkpoint.manifest import chat_templates_of, damage, read_manifest
from titanplans.training.checkpoint.storage import CheckpointReader, Planner
from titanplans.training.data.vocabulary import default_tokenizer_path
from titanplans.training.job.outputs import locked

pytestmark = pytest.mark.thorough

FULL = "can't be written (File too large)\n"
IN_HF = "--checkpoint.last_save_in_hf"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a finished job of 2 steps on 2 ranks that saved step 1 as a checkpoint and step 2 as a Hugging Face folder."""
    kernels.install("cpu")
    job = Job(tmp_path_factory.mktemp("job"))
    status = job.run("--training.steps=2", "--checkpoint.interval=1", IN_HF)
    assert status == 0, job.out + job.err
    return job


@pytest.fixture(scope="module")
def at(job):
    return job.folder / "out" / "checkpoint"


def run(capsys, *arguments):
    status = main([str(word) for word in arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def weights_of(checkpoint):
    metadata = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    names = [name for name in metadata if name.startswith(("model.", "lm_head."))]
    state = {name: torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype) for name in names}
    dcp_load(state, storage_reader=CheckpointReader(checkpoint), planner=Planner(), no_dist=True)
    return state


def test_the_last_step_is_a_folder_that_transformers_loads(job, at):
    last = at / "step-2"
    assert job.steps == [1, 2]
    loaded = AutoModelForCausalLM.from_pretrained(last)
    assert type(loaded).__name__ == "GLAForCausalLM"
    assert loaded.config.use_cache
    assert {"config.json", "model.safetensors", "tokenizer.json", "titanplans.json"} <= {
        p.name for p in last.iterdir()
    }
    assert damage(last) is None
    assert read_manifest(last).holds == "weights"


def test_a_finished_job_is_not_trained_again(job, at):
    options = ("--training.steps=2", "--checkpoint.interval=1", IN_HF)
    assert job.run(*options) == 0
    assert "step-2 is complete: the job has taken its training.steps = 2" in job.out
    assert job.run(*options, "--lora.rank=8") == 2
    assert "step-2 is the end of a finished job with other options (lora.rank = unset, now 8)" in job.err
    with locked(
        build_job({"job.dump_folder": str(job.folder / "out")})
    ):  # a lock, as if another job were training in this folder
        assert job.run(*options) == 2
    assert "another job writes to" in job.err
    assert job.run("--training.steps=3", "--checkpoint.load_step=2", IN_HF) == 2
    assert "step-2 holds only the weights (checkpoint.last_save_in_hf)" in job.err


def test_a_prolonged_job_logs_which_steps_it_repeats(job, at):
    shutil.copytree(at, job.folder / "prolonged" / "checkpoint")
    options = ("--job.dump_folder=prolonged", "--training.steps=3", "--checkpoint.interval=1")
    assert job.run(*options) == 0, job.err
    message = job.out + job.err
    assert "the job resumes from step-1 and repeats the steps up to 2: step-2 holds only" in message
    assert "checkpoint.last_save_model_only = false" in message
    assert [step for step, _ in job.losses] == [2, 3]
    shutil.copytree(at / "step-1", job.folder / "whole" / "checkpoint" / "step-1")
    options = ("--job.dump_folder=whole", "--checkpoint.no-last_save_model_only")
    assert job.run(*options, "--training.steps=2") == 0, job.err
    assert job.run(*options, "--training.steps=3") == 0, job.err
    assert [step for step, _ in job.losses] == [3]
    assert "again" not in job.out + job.err


def test_the_same_step_exported_has_the_same_weights(job, at, capsys):
    copy = job.folder / "again" / "checkpoint"
    copy.mkdir(parents=True)
    shutil.copytree(at / "step-1", copy / "step-1")
    options = ("--job.dump_folder=again", "--training.steps=2", "--checkpoint.interval=1")
    assert job.run(*options, "--checkpoint.last_save_model_only=false") == 0, job.err
    status, message = run(capsys, "export", copy / "step-2", job.folder / "hf")
    assert status == 0, message
    assert message == f"{job.folder}/hf: 0.001 GB in 5 files, the tokenizer of {default_tokenizer_path()}\n"
    exported, saved = (
        load_file(folder / "model.safetensors") for folder in (job.folder / "hf", at / "step-2")
    )
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    by_export, by_job = (
        AutoModelForCausalLM.from_pretrained(f).eval() for f in (job.folder / "hf", at / "step-2")
    )
    inputs = zoo.inputs("gla")
    assert torch.equal(by_export(**inputs).logits, by_job(**inputs).logits)


def test_an_exported_folder_is_pushed_with_a_card_that_says_how_it_was_trained(job, at, capsys, monkeypatch):
    command = ("export", at / "step-1", job.folder / "pushed", "--push-to-hub", "ada/tiny", "--private")
    with hub_server() as hub:
        monkeypatch.setattr(
            constants, "ENDPOINT", hub.address
        )  # huggingface_hub reads HF_ENDPOINT once, when it is imported
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        status, message = run(capsys, *command)
    assert status == 0, message
    assert message.endswith(f"{hub.address}/ada/tiny/commit/{1:040}\n")
    assert hub.private == {"ada/tiny": True}
    assert hub.messages == ["step-1, exported by titanplans"]
    files = {path.name: path.read_bytes() for path in (job.folder / "pushed").iterdir()}
    assert hub.files["ada/tiny"] == files
    card = ModelCard(files["README.md"].decode())
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["titanplans", "gla"],
    }
    count = sum(
        parameter.numel()
        for parameter in modeling.build(modeling.load_config_file(at / "step-2")).parameters()
    )
    assert f"{count:,} parameters of the architecture `gla`, trained for 1 step with titanplans" in card.text
    assert 'from_pretrained("ada/tiny")' in card.text
    assert str(job.folder) not in card.text
    block = card.text.partition("```toml\n")[2].partition("```")[0]
    options = tomli.loads(block)
    assert options["parallelism"] == {"tensor_parallel_degree": 2}
    assert options["training"]["steps"] == read_manifest(at / "step-1").job["training.steps"]
    assert "checkpoint" not in options


def test_a_folder_becomes_a_seed_that_a_job_starts_from(job, at, capsys):
    seed = job.folder / "seed" / "step-0"
    status, message = run(capsys, "import", at / "step-2", seed)
    assert status == 0, message
    assert message.endswith("; a job starts from it with checkpoint.initial_load_path\n")
    assert damage(seed) is None
    weights, saved = weights_of(seed), load_file(at / "step-2" / "model.safetensors")
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
    options = ("--job.dump_folder=started", "--training.steps=1", "--parallelism.tensor_parallel_degree=1")
    assert job.run(*options, f"--checkpoint.initial_load_path={seed}") == 0, job.err


def test_experts_and_towers_are_exported_and_imported(tmp_path, capsys):
    for name in ("mixtral", "gemma3", "qwen3"):
        model = zoo.build(name, dtype=torch.bfloat16 if name == "qwen3" else torch.float32)
        model.save_pretrained(tmp_path / name)
        assert run(capsys, "import", tmp_path / name, tmp_path / f"{name}-seed", "--dtype", "float32")[0] == 0
        arguments = (
            "export",
            tmp_path / f"{name}-seed",
            tmp_path / f"{name}-back",
            "--max-shard-size",
            "100KB",
        )
        assert run(capsys, *arguments)[0] == 0
        back = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-back")
        inputs = zoo.inputs(name)
        with torch.no_grad():
            assert torch.equal(back.eval()(**inputs).logits, model.float().eval()(**inputs).logits)


def test_only_a_few_tensors_are_in_memory(tmp_path, capsys):
    config = zoo.config(
        "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=4096
    )
    model = modeling.build(config).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(tmp_path / "folder")
    del model
    largest = 16  # MB; all tensors have 270 MB
    assert sum(path.stat().st_size for path in (tmp_path / "folder").iterdir()) > 200e6
    there = peak_without_files(lambda: run(capsys, "import", tmp_path / "folder", tmp_path / "seed"))
    back, _ = peak(
        lambda: run(capsys, "export", tmp_path / "seed", tmp_path / "back", "--max-shard-size", "50MB")
    )
    assert max(there, back) < 5 * largest
    imported, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("folder", "back")
    )
    assert all(torch.equal(imported[name], tensor) for name, tensor in expected.items())


def test_libraries_log_nothing(job, at):
    command = [sys.executable, "-m", "titanplans", "export", at / "step-1", job.folder / "quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


def test_a_refused_export_prints_one_line(job, at, tmp_path, capsys):
    step, new = at / "step-1", tmp_path / "new"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    plain = tmp_path / "plain" / "step-1"
    shutil.copytree(step, plain)
    (plain / "titanplans.json").unlink()
    flipped = tmp_path / "flipped" / "step-1"
    shutil.copytree(step, flipped)
    path = next(flipped.glob("*.distcp"))
    flip(path)
    zoo.config("gla", vocab_size=4096).save_pretrained(tmp_path / "other")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads((job.folder / "gla.json").read_text()) | {"num_heads": 2}))
    hf, metadata = at / "step-2", "it holds no distributed checkpoint (.metadata)"
    export = ("export", plain, new)
    for arguments, begins in (
        (("export", step, tmp_path / "there"), "export: /there already exists"),
        (("export", hf, new), f"export at/step-2: {metadata}; it already is a Hugging Face"),
        (("export", tmp_path / "there", new), f"export /there: {metadata}; name a folder step-N"),
        (export, "export /plain/step-1: it has no titanplans.json"),
        (
            ("export", flipped, new),
            f"export /flipped/step-1: /flipped/step-1/{path.name} is damaged: its checksum",
        ),
        (
            ("export", step, new, "--config", config),
            "--config /config.json: at/step-1 is of another model (num_heads = 4, now 2)",
        ),
        (
            (*export, "--config", tmp_path / "other"),
            "these are not the weights of a GLAForCausalLM.*model.embeddings.weight (4096, 32), expected",
        ),
        (("import", hf, tmp_path / "there"), "import: /there already exists"),
        (("import", hf, tmp_path / "step-7"), "import: /step-7 would be a checkpoint of another step"),
        (
            ("import", tmp_path / "there", new),
            "model config '/there/config.json' can't be read: No such file",
        ),
    ):
        status, message = run(capsys, *arguments)
        message = message.replace(str(tmp_path), "").replace(str(at), "at")
        assert re.match(re.escape(f"error: {begins}").replace(r"\.\*", ".*"), message), message
        assert (status, message.index("\n")) == (2, len(message) - 1)
    assert not new.exists()
    with largest_file(100_000):
        assert run(capsys, "export", step, new) == (1, f"error: {tmp_path}/.new.writing {FULL}")
        assert run(capsys, "import", at / "step-2", new) == (1, f"error: {new} {FULL}")
    assert not (tmp_path / ".new.writing").exists()
    assert run(capsys, *export, "--config", job.folder / "gla.json")[0] == 0


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


def test_the_folder_has_the_chat_template_that_the_job_trained_with(tmp_path, capsys):
    """Neither the folder's template file nor its tokenizer_config.json has the base model's template."""
    job = Job(tmp_path)
    shutil.copytree(default_tokenizer_path(), tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "old"}))
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("old")
    (tmp_path / "job.jinja").write_text(TEMPLATE)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    options = ("--training.steps=2", "--checkpoint.interval=1", IN_HF, "--model.hf_assets_path=tokenizer")
    options += (
        "--training.dataset=local",
        "--training.dataset_path=rows.jsonl",
        "--training.dataset_split=all",
    )
    options += ("--training.chat.enable", "--training.chat.chat_template=job.jinja")
    assert job.run(*options) == 0, job.out + job.err
    checkpoint = tmp_path / "out" / "checkpoint"

    def template_of(folder):
        assert "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text())
        return AutoTokenizer.from_pretrained(folder).chat_template

    assert template_of(checkpoint / "step-2") == TEMPLATE
    assert damage(checkpoint / "step-2") is None
    arguments = ("export", checkpoint / "step-1")
    status, message = run(capsys, *arguments, tmp_path / "missing", "--tokenizer", tmp_path / "tokenizer")
    assert status == 2
    assert (
        "the chat template job.jinja can't be read (No such file or directory); pass a Jinja file" in message
    )
    with contextlib.chdir(tmp_path):
        assert run(capsys, *arguments, "hf") == (
            0,
            "hf: 0.001 GB in 6 files, the tokenizer of tokenizer with the chat template job.jinja\n",
        )
        (tmp_path / "other.jinja").write_text("other")
        assert run(capsys, *arguments, "other", "--chat-template", "other.jinja")[0] == 0
    assert template_of(tmp_path / "hf") == TEMPLATE
    assert template_of(tmp_path / "other") == "other"


def test_sources_of_several_templates_name_one():
    sources = [
        {
            "name": "a",
            "dataset": "local",
            "dataset_path": "a",
            "chat": {"enable": True, "chat_template": "a.jinja"},
        },
        {"name": "b", "dataset": "local", "dataset_path": "b", "chat": {"enable": True}},
    ]
    error = refusal(
        build_job, {"data.sources": sources, "checkpoint.enable": True, "checkpoint.last_save_in_hf": True}
    )
    assert (
        "its folder has one chat template, but the sources have a.jinja and the tokenizer's; set the same for all"
        in error
    )
    assert chat_templates_of({"data.sources": sources}) == {"a.jinja", None}
    assert chat_templates_of({"data.sources": sources[:1], "training.chat.enable": False}) == {"a.jinja"}
    assert (
        chat_templates_of({"training.chat.chat_template": "a.jinja", "training.chat.enable": False}) == set()
    )
