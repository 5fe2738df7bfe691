"""Jobs whose sequences are shared by ranks of context parallelism, against one process: losses, norms, counts, resumes.

One spawn of each size, shared by all cases.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import worlds
import zoo
from test_trainer import train, write_inputs

CP, TP = "--parallelism.context_parallel_degree=2", "--parallelism.tensor_parallel_degree=2"
STEPS = ("--training.steps=3", "--lr_scheduler.total_steps=8", "--training.local_batch_size=8")
HALF = (*STEPS[:2], "--training.local_batch_size=4")
HSDP = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")
DDP = ("--parallelism.data_parallel_strategy=ddp", "--parallelism.data_parallel_replicate_degree=2")
VALIDATION = ("--validation.enable", "--validation.freq=2", "--validation.steps=2", "--validation.seq_len=30")
FIGURES = ("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm", "n_tokens_seen",
           "validation_metrics/loss")  # fmt: skip
MODELS = {
    "samba": dict(vocab_size=4096, attn=dict(layers=[1], num_heads=8, num_kv_heads=2, window_size=5)),
    "qwen3_next": dict(vocab_size=4096, layer_types=["linear_attention", "full_attention"], num_experts=4),
    "mixtral": dict(vocab_size=4096, output_router_logits=True, router_aux_loss_coef=0.5),
}


def inputs(folder: Path) -> Path:
    write_inputs(folder)
    for name, fields in MODELS.items():
        config = zoo.config(name, options=False, **fields)
        (folder / f"{name}.json").write_text(config.to_json_string(use_diff=False))
    return folder


def figures(folder: Path, model: str, dump: str, *options: str) -> dict[str, dict[int, float]]:
    recorder, _ = train(folder, model, dump, *options)
    return {name: found for name in FIGURES if (found := recorder.losses(name))}


def on_one_rank(rank: int) -> dict:
    folder = Path(os.environ["TEST_FOLDER"])
    found = {}
    for model in ("gla", *MODELS):
        found[model] = figures(folder, model, f"{model} alone", *STEPS, *VALIDATION)
    return found


def on_four_ranks(rank: int) -> dict:
    folder = Path(os.environ["TEST_FOLDER"])
    return {
        ("gla", "tp 2 x cp 2"): figures(folder, "gla", "gla, both", *STEPS, *VALIDATION, TP, CP),
        ("samba", "cp 2 x fsdp 2"): figures(folder, "samba", "samba", *HALF, *VALIDATION, CP),
        ("qwen3_next", "cp 2 x fsdp 2"): figures(folder, "qwen3_next", "qwen", *HALF, *VALIDATION, CP),
        ("mixtral", "cp 2 x tp 2"): figures(folder, "mixtral", "mixtral", *STEPS, *VALIDATION, CP, TP),
        ("gla", "cp 2 x hsdp 2"): figures(folder, "gla", "gla, hsdp", *HALF, *VALIDATION, CP, *HSDP),
        ("gla", "cp 2 x ddp 2"): figures(folder, "gla", "gla, ddp", *HALF, *VALIDATION, CP, *DDP),
    }


if __name__ == "__main__":
    import tempfile, pprint
    folder = inputs(Path(tempfile.mkdtemp()))
    one = worlds.run(on_one_rank, 1)
    pprint.pprint(one)
    pprint.pprint(worlds.run(on_four_ranks, 4))
