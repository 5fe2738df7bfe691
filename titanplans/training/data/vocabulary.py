"""Where the tokenizer lies, whether it can be loaded, and how many tokens it has."""

import logging
import os
from pathlib import Path

from tokenizers import Tokenizer

from titanplans.errors import DataError
from titanplans.training.data.reading import refusing


def default_tokenizer_path() -> str:
    """The folder of the committed tokenizer, for `[model] hf_assets_path` (4096 tokens, see docs/data.md)."""
    return str(Path(__file__).parent / "tokenizer")


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of the folder `path`, without the bos/eos handling that torchtitan adds.

    Raises:
        DataError: the folder or its tokenizer.json is missing, or the file is no tokenizer's.
    """
    text = _read(path, "tokenizer.json")
    with refusing(f"hf_assets_path = {path!r}: tokenizer.json is no tokenizer", _remedy()):
        return Tokenizer.from_str(text)


def check_tokenizer(path: str) -> int:
    """How many tokens a model needs for the tokenizer of the folder `path`: one more than its largest id.

    It is loaded as the trainer does: tokenizer_config.json and chat_template.jinja are read, too, where they are there.

    Raises:
        DataError: the folder or its tokenizer.json is missing, or one of the files can't be used.
    """
    load_tokenizer(path)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if os.path.lexists(os.path.join(path, name)):
            _read(path, name)
    from titanplans.training.data.text_tokenizer import TextTokenizer  # which imports torchtitan

    log = logging.getLogger()
    level = log.level
    log.setLevel(logging.ERROR)  # which files it has found is said when training loads it
    try:
        with refusing(f"hf_assets_path = {path!r}: its tokenizer can't be used", _remedy()):
            tokenizer = TextTokenizer.Config().build(tokenizer_path=path)
            return max(tokenizer.get_vocab().values(), default=-1) + 1  # ids may leave gaps
    finally:
        log.setLevel(level)


def _read(path: str, name: str) -> str:
    file = Path(path) / name
    with refusing(f"hf_assets_path = {path!r}: no {name} can be read there", _remedy()):
        if file.exists() and not file.is_file():  # a pipe, which would be waited for
            raise DataError(f"hf_assets_path = {path!r}: {name} is no file; {_remedy()}")
        return file.read_text(encoding="utf-8")


def _remedy() -> str:
    return f"give a folder with a tokenizer.json; the project's own is {default_tokenizer_path()!r}"
