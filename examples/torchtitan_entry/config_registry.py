"""Configs for torchtitan's entry.

torchrun --nproc-per-node 2 -m torchtitan.train --module examples.torchtitan_entry --config gla_debug
"""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.trainer import Trainer

from titanplans.integrations.torchtitan import model_spec


def gla_debug() -> Trainer.Config:
    """Return the config of a small GLA, tensor parallel over two ranks."""
    return _config("gla")


def qwen3_debug() -> Trainer.Config:
    """Return the config of a small Qwen3, tensor parallel over two ranks."""
    return _config("qwen3")


def _config(name: str) -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_spec(name, "debug"),
        hf_assets_path="titanplans/training/data/tokenizer",  # has 4,096 tokens, as many as the debug flavors
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(local_batch_size=4, seq_len=128, steps=8),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, spmd_backend="partial_dtensor"),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        metrics=MetricsProcessor.Config(log_freq=1),
    )
