"""Jobs that train adapters: checkpoints of adapters alone, resuming from them, and starting from files of peft."""

import copy
import json
import shutil
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import zoo
from tests.support import process_groups
from tests.support.trained_jobs import train, write_inputs
from titanplans.cli.main import main
from titanplans.config import load_job, strategy_of
from titanplans.training.checkpoint.manifest import damage
from titanplans.training.checkpoint.storage import CheckpointReader
from titanplans.training.data.vocabulary import default_tokenizer_path

SAVES = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last_save_model_only")
TP = "--parallelism.tensor_parallel_degree=2"
FROM_4 = ("--checkpoint.load_step=4", "--checkpoint.load_only")


def _jobs(rank: int, folder: Path) -> dict:
    from titanplans.training.job.checks import check_job
    from titanplans.weights.adapters import WEIGHTS, save_adapter

    train(folder, "dense", "base", TP, "--checkpoint.enable", "--training.steps=2")
    base = f"--checkpoint.initial_load_path={folder}/base/checkpoint/step-2"
    adapters = ("--lora.rank=3", "--lora.dropout=0.1", base, "--checkpoint.save_adapters_only")
    job = (folder, "dense", "tuned", *SAVES, *adapters)
    recorder, trainer = train(*job, TP)
    results = {"uninterrupted": recorder.losses()}
    lm = trainer.model_parts[0].lm
    results["optimized"] = sum(
        len(group["params"]) for each in trainer.optimizers for group in each.param_groups
    )
    results["trained"] = sum(param.requires_grad for param in lm.parameters())
    save_adapter(lm, folder / "peft")
    index = CheckpointReader(folder / "tuned" / "checkpoint" / "step-4").read_metadata().state_dict_metadata
    results["saved"] = [
        name for name in index if not name.startswith(("optimizer", "train_state", "lr_", "dataloader"))
    ]
    arguments = [
        f"{folder}/job.toml",
        f"--job.dump_folder={folder}/tuned",
        f"--model.config={folder}/dense.json",
    ]
    arguments += [f"--training.dataset_path={folder}/text", *SAVES, *adapters, *FROM_4]
    check_job(load_job([*arguments, TP]), 2)
    results["resumed"] = train(*job, TP, *FROM_4)[0].losses()
    still = ("--training.steps=1", "--optimizer.lr=1e-12", "--lora.rank=3", "--checkpoint.enable")
    _, trainer = train(
        folder, "dense", "again", TP, *still, f"--checkpoint.initial_adapter_path={folder}/peft"
    )
    save_adapter(trainer.model_parts[0].lm, folder / "again")
    if rank == 0:
        first, second = (load_file(folder / name / WEIGHTS) for name in ("peft", "again"))
        results["reload_error"] = max(float((first[name] - second[name]).abs().max()) for name in first)
        results["largest_update"] = max(
            float(tensor.abs().max()) for name, tensor in first.items() if "lora_B" in name
        )
    return results


def _fine_tuned(rank: int, folder: Path) -> dict:
    """Fine-tune a Hugging Face folder over tp 2 x fsdp 2; return the logits of the trained models."""
    start = (
        "--checkpoint.enable",
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={folder}/hf",
    )
    tuned = ("--lora.rank=3", "--lora.alpha=30", "--optimizer.lr=1e-2", "--lr_scheduler.warmup_steps=0")
    results = {}
    for name, options in JOBS.items():
        _, trainer = train(folder, "qwen", name, TP, "--training.steps=2", *start, *tuned, *options)
        lm = trainer.model_parts[0].lm.eval()
        with torch.no_grad():
            results[name] = lm(input_ids=IDS).logits.full_tensor()
    return results


IDS = torch.arange(32).reshape(2, 16) * 7
JOBS = {
    "merged": ("--checkpoint.last_save_in_hf", "--checkpoint.export_dtype=float32"),
    "nf4": ("--lora.quantize_base=nf4", "--checkpoint.no-last_save_model_only"),
    "alone": ("--checkpoint.save_adapters_only", "--checkpoint.no-last_save_model_only"),
    "nf4 alone": (
        "--checkpoint.save_adapters_only",
        "--lora.quantize_base=nf4",
        "--lora.modules_to_save=norm",
    ),
}


@pytest.mark.thorough
def test_a_hugging_face_model_is_fine_tuned_and_exported(tmp_path, capsys):
    """The model is exported by the job's last step, by `titanplans export` (also from NF4 weights), and as adapters for
    peft."""
    folder = write_inputs(tmp_path)
    fields = dict(vocab_size=4096, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=128)
    base = zoo.build("qwen3", dtype=torch.float32, tie_word_embeddings=False, **fields)
    base.save_pretrained(folder / "hf")
    shutil.copy(Path(default_tokenizer_path()) / "tokenizer.json", folder / "hf")
    shutil.copy(folder / "hf" / "config.json", folder / "qwen.json")
    results = process_groups.run(partial(_fine_tuned, folder=folder), 4)

    def step(name: str) -> Path:
        return folder / name / "checkpoint" / "step-2"

    def export(source: Path, name: str, *arguments: str) -> str:
        assert main(["export", str(source), str(folder / name), *arguments]) == 0
        return capsys.readouterr().out

    assert "added to base weights rounded to NF4" in export(step("nf4"), "out")
    export(step("alone"), "adapter", "--adapter")
    export(step("nf4"), "adapter of nf4", "--adapter")
    export(step("alone"), "alone, merged")
    export(step("nf4 alone"), "nf4 alone, merged")
    assert "NF4" not in export(folder / "adapter of nf4", "nf4, onto the whole base", "--dtype=float32")
    export(folder / "adapter", "of peft, merged", "--dtype=float32")
    ranks = []
    for name in ("nf4, onto the whole base", "out"):
        layer = AutoModelForCausalLM.from_pretrained(folder / name).model.layers[0]
        update = layer.mlp.up_proj.weight - base.model.layers[0].mlp.up_proj.weight
        ranks.append(torch.linalg.matrix_rank(update, rtol=1e-4))
    assert ranks[0] <= 3 < ranks[1], "the rank of the adapter; the other change also has the rounding of NF4"
    assert damage(step("merged")) is None
    by = {
        "merged": AutoModelForCausalLM.from_pretrained(step("merged")),
        "nf4": AutoModelForCausalLM.from_pretrained(folder / "out"),
        "nf4 alone": AutoModelForCausalLM.from_pretrained(folder / "nf4 alone, merged"),
    }
    for name, path in (("alone", folder / "adapter"), ("merged", step("merged") / "adapter")):
        adapted, to_merge = (peft.PeftModel.from_pretrained(copy.deepcopy(base), path) for _ in range(2))
        assert adapted.peft_config["default"].base_model_name_or_path == str(folder / "hf")
        by |= {f"{name}, by peft": adapted, f"{name}, merged by peft": to_merge.merge_and_unload()}
    for name in ("alone", "of peft"):
        by[f"alone, {name}"] = AutoModelForCausalLM.from_pretrained(folder / f"{name}, merged")
    with torch.no_grad():
        before = base.eval()(input_ids=IDS).logits
        for name, model in by.items():
            trained = results[name.partition(",")[0]]
            logits = model.eval()(input_ids=IDS).logits
            torch.testing.assert_close(logits, trained, rtol=0, atol=1e-4, msg=name)
            assert (trained - before).abs().max() > 1e-2, f"{name} has learned nothing"


def test_adapters_alone_are_saved_and_resumed(tmp_path, capsys):
    results = process_groups.run(partial(_jobs, folder=write_inputs(tmp_path)), 2)
    assert results["saved"]
    assert all(name.endswith(("lora_A", "lora_B")) for name in results["saved"])
    assert results["optimized"] == results["trained"] == len(results["saved"])
    assert sorted(results["uninterrupted"]) == list(range(1, 9))
    assert results["resumed"] == {step: loss for step, loss in results["uninterrupted"].items() if step > 4}
    assert results["largest_update"] > 1e-4
    assert results["reload_error"] < 1e-8
    _exported(tmp_path, capsys)


def _exported(folder: Path, capsys) -> None:
    """Export merges the adapters into the weights of the checkpoint that the job started from, and refuses others."""
    last, base = folder / "tuned" / "checkpoint" / "step-8", folder / "base" / "checkpoint" / "step-2"

    def export(checkpoint: Path, name: str, *arguments: object) -> tuple[int, list[str]]:
        status = main(["export", str(checkpoint), str(folder / name), *map(str, arguments)])
        return status, capsys.readouterr().err.splitlines()[-1:]

    assert export(last, "merged") == export(base, "plain") == (0, [])
    assert export(last, "adapter", "--adapter") == (0, [])
    assert export(folder / "adapter", "of peft, merged") == (0, [])
    plain = AutoModelForCausalLM.from_pretrained(folder / "plain")
    tuned = peft.PeftModel.from_pretrained(plain, folder / "adapter").merge_and_unload().eval()
    with torch.no_grad():
        expected = tuned(input_ids=IDS).logits
        for name in ("merged", "of peft, merged"):
            logits = AutoModelForCausalLM.from_pretrained(folder / name).eval()(input_ids=IDS).logits
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5, msg=name)
    assert (
        expected - AutoModelForCausalLM.from_pretrained(folder / "plain")(input_ids=IDS).logits
    ).abs().max() > 1e-3

    zoo.build("qwen3", dtype=torch.float32).save_pretrained(folder / "other")
    config = json.loads((folder / "plain" / "config.json").read_text())
    shutil.copytree(folder / "plain", folder / "same shapes")
    (folder / "same shapes" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    refused = {
        "another": export(last, "x", "--base", folder / "other"),
        "same shapes": export(last, "x", "--base", folder / "same shapes"),
        "whole": export(base, "x", "--base", folder / "plain"),
        "twice": export(last, "x", "--adapter", "--base", folder / "plain"),
        "peft's": export(folder / "adapter", "x", "--adapter"),
        "no adapters": export(base, "x", "--adapter"),
    }
    base.rename(folder / "moved")
    refused["gone"] = export(last, "x")
    assert {status for status, _ in refused.values()} == {2}
    lines = {case: message[0].replace(str(folder), "") for case, (_, message) in refused.items()}
    step = "error: export /tuned/checkpoint/step-8"
    assert "does not hold the weights of this model" in lines.pop("another")
    to = "--base names the base weights of adapters, but"
    begin = {
        "same shapes": f"{step}: /same shapes: it is of another model (rms_norm_eps = 0.5, now 1e-06)",
        "whole": f"error: export /base/checkpoint/step-2: {to} the checkpoint holds",
        "twice": f"{step}: {to} --adapter writes",
        "peft's": "error: export /adapter: it already has peft's format",
        "no adapters": "error: export /base/checkpoint/step-2: it has no adapters",
        "gone": f"{step}: it holds only adapters, and there is no /base/checkpoint/step-2",
    }
    assert {case: line[: len(begin[case])] for case, line in lines.items()} == begin


def test_the_keys_become_options_of_the_strategy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(
        "[training]\nfreeze = ['embed']\n[lora]\nrank = 4\ntarget_modules = ['q_proj']\n"
    )
    strategy = strategy_of(load_job(["job.toml"]))
    assert strategy.freeze == ("embed",)
    assert (strategy.lora.rank, strategy.lora.alpha, strategy.lora.target_modules) == (4, None, ("q_proj",))
