"""Train the default tokenizer: `python -m titanplans.training.data.train_tokenizer [--out FOLDER]`.

It is a byte-level BPE of 4096 tokens, trained on the training split of the standard library's sources. The same Python
release gives the same file, byte for byte.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from titanplans.training.data.corpus.local import TextFiles, stdlib_files, stdlib_root
from titanplans.training.data.vocabulary import default_tokenizer_path

# The vocabulary is small, so that embedding and head of a debug model stay small, and a run of two minutes sees every token
# often enough to learn it.
VOCAB_SIZE = 4096
BOS, EOS = "<|bos|>", "<|eos|>"


def train(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens: BOS, EOS, the 256 bytes, and merges.

    Every byte is a token, so any text can be encoded and decoded; there is no unknown token.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json`, and `tokenizer_config.json`, which names the tokens that begin and end a text."""
    folder.mkdir(parents=True, exist_ok=True)
    # ASCII in one line: no editor or checkout changes a byte of it.
    compact = json.dumps(json.loads(tokenizer.to_str()), separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact + "\n", encoding="ascii")
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="ascii")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(default_tokenizer_path()), help="folder to write to")
    out = parser.parse_args().out
    root = stdlib_root()
    corpus = TextFiles(root, stdlib_files(root), "train")
    texts = [corpus.document(i) for i in range(len(corpus))]
    save(train(texts), out)
    print(f"{out}: {VOCAB_SIZE} tokens from {len(texts)} documents, {sum(map(len, texts)):,} characters")


if __name__ == "__main__":
    main()
