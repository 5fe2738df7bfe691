"""The committed tokenizer is as docs/data.md describes it, and its encoding is lossless."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from titanplans.training.data.train_tokenizer import BOS, EOS, VOCAB_SIZE, save, train
from titanplans.training.data.vocabulary import default_tokenizer_path, load_tokenizer

TOKENIZER = load_tokenizer(default_tokenizer_path())


@given(st.text().filter(lambda text: BOS not in text and EOS not in text))
def test_any_text_is_decoded_as_it_was_encoded(text):
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids) == text
    assert not {0, 1} & set(ids)
    assert len(ids) <= len(text.encode())


def test_its_size_and_special_tokens():
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE == 4096
    assert (TOKENIZER.token_to_id(BOS), TOKENIZER.token_to_id(EOS)) == (0, 1)
    file = Path(default_tokenizer_path()) / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    assert len(model["vocab"]) == VOCAB_SIZE
    assert len(model["merges"]) == VOCAB_SIZE - 256 - 2
    assert file.stat().st_size < 400_000
    assert sorted(model["vocab"].values()) == list(range(VOCAB_SIZE))


def test_it_needs_less_than_a_token_for_three_bytes_of_held_out_text():
    from tests.support.data_sources import open_source

    texts = [text for _, text in open_source("stdlib", split="validation").documents(0, 0, 1, None)]
    tokens = sum(len(TOKENIZER.encode(text).ids) for text in texts)
    assert sum(len(text.encode()) for text in texts) / tokens > 3


def test_torchtitan_finds_both_special_tokens():
    tokenizer = HuggingFaceTokenizer.Config().build(tokenizer_path=default_tokenizer_path())
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    ids = tokenizer.encode("x = 1\n", add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids) == "x = 1\n"


def test_transformers_loads_the_same_tokenizer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_tokenizer_path())
    text = "def naïve(x):\n    return '日本語'\n"
    assert tokenizer(text)["input_ids"] == TOKENIZER.encode(text).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.parametrize("vocab_size", [300])
def test_training_is_deterministic(tmp_path, vocab_size):
    texts = ["the cat sat on the mat\n" * 5, "for x in range(10):\n    print(x)\n" * 5] * 4
    for name in ("a", "b"):
        save(train(texts, vocab_size), tmp_path / name)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
        tmp_path / "b" / "tokenizer.json"
    ).read_bytes()
    small = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    assert small.decode(small.encode("the naïve cat").ids) == "the naïve cat"
