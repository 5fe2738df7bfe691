"""Train small jobs in this process, and record the metrics and messages that they log."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "vocab_size": 4096,
    "intermediate_size": 64,
}

MODELS = {
    "gla": {"model_type": "gla", "expand_k": 1.0} | SMALL,
    "transformer": {"model_type": "transformer"} | SMALL,
}

# With dropout, which draws random numbers at every step.
MODELS["llama"] = {
    "model_type": "llama",
    "attention_dropout": 0.2,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}

# Without dropout, which a split model can't have.
MODELS["dense"] = MODELS["llama"] | {"attention_dropout": 0.0}

JOB = """
[training]
local_batch_size = 4
seq_len = 32
steps = 8
mixed_precision_param = "float32"
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 2
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[debug]
seed = 3
"""

DEGREE, LOSS_PARALLEL = "--parallelism.tensor_parallel_degree=2", "--parallelism.disable_loss_parallel"


def write_inputs(folder: Path) -> Path:
    """Write a job, models and a text into `folder`, make TEST_FOLDER name it for ranks, and return it."""
    os.environ["TEST_FOLDER"] = str(folder)
    (folder / "job.toml").write_text(JOB)
    for name, config in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    (folder / "text").mkdir()
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards"]
    for index in range(60):
        picked = [words[(index * 7 + i * i) % len(words)] for i in range(120)]
        (folder / "text" / f"{index}.txt").write_text(" ".join(picked))
    return folder


class Recorder:
    """A metrics logger that keeps in `rows` what it logs, and passes it on to other loggers."""

    def __init__(self, *others):
        self.others, self.rows = others, []

    def log(self, metrics, step):
        self.rows.append({"step": step, **metrics})
        for other in self.others:
            other.log(metrics, step)

    def close(self):
        for other in self.others:
            other.close()

    def losses(self, key="loss_metrics/global_avg_loss"):
        return {row["step"]: row[key] for row in self.rows if key in row}


def train(folder: Path, model: str, dump: str, *options: str, prepare=None):
    """Run a job in this process, within the existing process group; return the logged metrics, and the trainer.

    `model` is the name of a config file in `folder`, or "module:Class". `prepare(trainer)` is called before training.
    """
    from titanplans.config import load_job
    from titanplans.training.trainer.device import prepare_device

    device_type = prepare_device()

    from titanplans import kernels
    from titanplans.training.trainer.trainer import Trainer

    kernels.install(device_type)
    source = f"class={model}" if ":" in model else f"config={folder}/{model}.json"
    paths = [f"--model.{source}", f"--training.dataset_path={folder}/text"]
    job = load_job([f"{folder}/job.toml", f"--job.dump_folder={folder}/{dump}", *paths, *options])
    trainer = Trainer(job)
    processor = trainer.metrics_processor
    recorder = processor.logger = Recorder(processor.logger)
    if prepare is not None:
        prepare(trainer)
    trainer.train()
    trainer.checkpointer.close()
    processor.close()
    return recorder, trainer


def losses_of(folder: Path, *args: str) -> dict[int, float]:
    return train(folder, *args)[0].losses()


@contextmanager
def logged_messages() -> Iterator[list[str]]:
    """Collect the messages that this rank logs in the body."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    yield lines
    logging.getLogger().removeHandler(handler)
