"""Tensor parallelism in TRL's SFTTrainer.

torchrun --nproc-per-node 2 -m examples.trl_sft
"""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from examples.transformers_trainer import sequences, small_model
from titanplans import Degrees
from titanplans.integrations.transformers import SplitTrainer, split_model


class MySFTTrainer(SplitTrainer, SFTTrainer):
    """An SFTTrainer of split models."""


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with 512 tokens: words w0, w1, ..., a padding token and an end token."""
    words = ["<pad>", "<eos>", *(f"w{index}" for index in range(510))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def texts() -> Dataset:
    """Return 64 texts of 5 to 15 words, so that batches are padded to even and to odd lengths."""
    rows = [row["input_ids"][: 5 + index % 11] for index, row in enumerate(sequences())]
    return Dataset.from_list([{"text": " ".join(f"w{token}" for token in row.tolist())} for row in rows])


def train(folder: str, degrees: Degrees | None, resume: str | None = None, **options) -> list[dict]:
    """Train eight steps, and return the trainer's log. The arguments are explained at `transformers_trainer.train`."""
    defaults = dict(
        max_steps=8, save_steps=4, logging_steps=1, learning_rate=1e-3, report_to="none", bf16=False
    )
    arguments = SFTConfig(folder, **defaults | dict(per_device_train_batch_size=4) | options)
    kind = SFTTrainer if degrees is None else MySFTTrainer
    model = small_model() if degrees is None else split_model(small_model(), degrees)
    trainer = kind(model, arguments, train_dataset=texts(), processing_class=small_tokenizer())
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    return trainer.state.log_history


if __name__ == "__main__":
    train("outputs/trl_sft", Degrees(tp=2))
