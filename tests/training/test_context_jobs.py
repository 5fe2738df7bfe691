"""Jobs whose sequences are shared by ranks of context parallelism, against one process: losses, norms, counts, resumes.

One spawn of each size, shared by all cases.
"""

import os
from pathlib import Path

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
PUBLISHED = ("--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.last_save_in_hf")
JOBS = {
    "gla, tp 2 x cp 2": ("gla", (*STEPS, TP, CP)),
    "samba, cp 2 x fsdp 2": ("samba", (*HALF, CP)),
    "qwen3_next, cp 2 x fsdp 2": ("qwen3_next", (*HALF, CP)),
    "mixtral, tp 2 x cp 2": ("mixtral", (*STEPS, TP, CP)),
    "gla, cp 2 x hsdp 2": ("gla", (*HALF, CP, *HSDP)),
    "gla, cp 2 x ddp 2, accumulated": (
        "gla",
        (*HALF[:2], "--training.local_batch_size=2", "--training.gradient_accumulation_steps=2", CP, *DDP),
    ),
    "gla, cp 2 x fsdp 2, accumulated": (
        "gla",
        (
            *HALF[:2],
            "--training.local_batch_size=2",
            "--training.gradient_accumulation_steps=2",
            CP,
            "--parallelism.fsdp_defer_grad_sync=all",
        ),
    ),
    "samba, cp 4, compiled and recomputed": (
        "samba",
        (
            *STEPS,
            "--parallelism.context_parallel_degree=4",
            "--compile.enable",
            "--compile.backend=aot_eager",
            "--activation_checkpoint.mode=full",
        ),
    ),
    "gla, cp 2 x fsdp 2, loss from logits": ("gla", (*HALF, CP, "--loss.no-fused")),
}
TUNED = {
    "lora": ("gla", ("--lora.rank=3", "--optimizer.lr=3e-2")),
    "qlora": ("wide", ("--lora.rank=3", "--lora.quantize_base=nf4", "--optimizer.lr=3e-2")),
    "muon": (
        "dense",
        ("--optimizer.name=Muon", "--optimizer.groups=[{pattern = 'embed|lm_head', lr = 1e-3}]"),
    ),
}
MODELS = {
    "samba": dict(vocab_size=4096, attn=dict(layers=[1], num_heads=8, num_kv_heads=2, window_size=5)),
    "qwen3_next": dict(
        vocab_size=4096,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        output_router_logits=False,
    ),
    "mixtral": dict(vocab_size=4096, output_router_logits=True, router_aux_loss_coef=0.5),
}


WIDE = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=64, intermediate_size=128)


def inputs(folder: Path) -> Path:
    write_inputs(folder)
    wide = zoo.config("qwen3", options=False, vocab_size=4096, num_hidden_layers=1, **WIDE)
    configs = {name: zoo.config(name, options=False, **fields) for name, fields in MODELS.items()}
    for name, config in (configs | {"wide": wide}).items():
        (folder / f"{name}.json").write_text(config.to_json_string(use_diff=False))
    return folder


def figures(folder: Path, model: str, dump: str, *options: str) -> dict[str, dict[int, float]]:
    recorder, _ = train(folder, model, dump, *options)
    return {name: found for name in FIGURES if (found := recorder.losses(name))}


def on_one_rank(rank: int) -> dict:
    folder = Path(os.environ["TEST_FOLDER"])
    found = {
        model: figures(folder, model, f"{model} alone", *STEPS, *VALIDATION) for model in ("gla", *MODELS)
    }
    for name, (model, options) in TUNED.items():
        found[name] = figures(folder, model, f"{name} alone", *STEPS, *options)
    found["whole"] = figures(folder, "gla", "whole", STEPS[2], *PUBLISHED)
    return found


def on_four_ranks(rank: int) -> dict:
    folder = Path(os.environ["TEST_FOLDER"])
    found = {}
    for name, (model, options) in JOBS.items():
        found[name] = figures(folder, model, name, *options, *VALIDATION)
    for name, (model, options) in TUNED.items():
        found[name, "tp 2 x cp 2"] = figures(folder, model, f"{name}, tp", *STEPS, *options, TP, CP)
        found[name, "cp 2 x fsdp 2"] = figures(folder, model, f"{name}, fsdp", *HALF, *options, CP)
    saves = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last_save_model_only")
    found["begun"] = figures(folder, "gla", "moved", "--training.steps=2", *HALF[1:], *saves, CP)
    found["moved to tp"] = figures(folder, "gla", "moved", "--training.steps=4", *STEPS[1:], *saves, TP, CP)
    found["moved to ddp"] = figures(folder, "gla", "moved", "--training.steps=6", *HALF[1:], *saves, *DDP, CP)
    found["moved to no cp"] = figures(folder, "gla", "moved", HALF[2], *PUBLISHED, TP)
    return found


if __name__ == "__main__":
    import pprint
    import tempfile

    folder = inputs(Path(tempfile.mkdtemp()))
    one = worlds.run(on_one_rank, 1)
    pprint.pprint(one)
    pprint.pprint(worlds.run(on_four_ranks, 4))
