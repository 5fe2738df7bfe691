"""Tensor parallelism in Hugging Face's Trainer.

torchrun --nproc-per-node 2 -m examples.transformers_trainer     # losses near 6.25: the tokens are random
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from titanplans import Degrees
from titanplans.integrations.transformers import SplitTrainer, split_model


class MyTrainer(SplitTrainer, Trainer):
    """A Trainer of split models."""


def small_model() -> Qwen3ForCausalLM:
    """Return a Qwen3 with 130 thousand parameters, the same on every rank."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return Qwen3ForCausalLM(config).float()


def sequences(count: int = 64, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return random sequences. Every fifth label is ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(512, (count, length), generator=generator)
    ignored = torch.arange(length) % 5 == 0
    return [{"input_ids": row, "labels": row.masked_fill(ignored, -100)} for row in tokens]


def train(folder: str, degrees: Degrees | None, resume: str | None = None, **options) -> list[dict]:
    """Train eight steps, and return the Trainer's log.

    Args:
        folder: a folder for checkpoints and for the trained model.
        degrees: the degrees of parallelism; None: train an unsplit model in a plain Trainer.
        resume: a checkpoint from which training continues.
        options: further arguments of TrainingArguments.
    """
    defaults = dict(
        max_steps=8, save_steps=4, eval_strategy="steps", eval_steps=4, logging_steps=1, learning_rate=1e-2
    )
    defaults |= dict(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.5, report_to="none"
    )
    arguments = TrainingArguments(folder, **defaults | options)
    data = sequences()
    if degrees is None:
        trainer = Trainer(small_model(), arguments, train_dataset=data, eval_dataset=data[:8])
    else:
        model = split_model(small_model(), degrees)
        trainer = MyTrainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")  # a folder that from_pretrained loads
    return trainer.state.log_history


if __name__ == "__main__":
    train("outputs/transformers_trainer", Degrees(tp=2))
