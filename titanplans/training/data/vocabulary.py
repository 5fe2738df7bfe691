"""Load and check the tokenizer in a folder; `default_tokenizer_path` returns the default folder."""

import logging
import os
from pathlib import Path

from tokenizers import Tokenizer

from titanplans.errors import DataError
from titanplans.training.data.data_errors import as_data_error


def default_tokenizer_path() -> str:
    """Return the folder of this package's tokenizer (4096 tokens), which is the default of model.hf_assets_path."""
    return str(Path(__file__).parent / "tokenizer")


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer in the folder `path`, without the bos/eos handling that torchtitan adds.

    Raises:
        DataError: the folder or its tokenizer.json is missing, or the file can't be loaded.
    """
    text = _read(path, "tokenizer.json")
    with as_data_error(f"hf_assets_path = {path!r}: tokenizer.json is not a tokenizer", _remedy()):
        return Tokenizer.from_str(text)


def check_tokenizer(path: str) -> int:
    """Return the vocabulary size that a model needs for the tokenizer in the folder `path`: its largest id plus one.

    The tokenizer is loaded like in the trainer, with tokenizer_config.json and chat_template.jinja if they exist.

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
    log.setLevel(logging.ERROR)  # torchtitan logs the files that it finds, again when training loads it
    try:
        with as_data_error(f"hf_assets_path = {path!r}: its tokenizer can't be used", _remedy()):
            tokenizer = TextTokenizer.Config().build(tokenizer_path=path)
            return max(tokenizer.get_vocab().values(), default=-1) + 1  # ids may leave gaps
    finally:
        log.setLevel(level)


def _read(path: str, name: str) -> str:
    file = Path(path) / name
    with as_data_error(f"hf_assets_path = {path!r}: no {name} can be read there", _remedy()):
        if file.exists() and not file.is_file():  # reading a pipe would block
            raise DataError(f"hf_assets_path = {path!r}: {name} is not a file; {_remedy()}")
        return file.read_text(encoding="utf-8")


def _remedy() -> str:
    return f"give a folder with a tokenizer.json; the default is {default_tokenizer_path()!r}"
