"""Where the tokenizer lies, whether it can be loaded, and how many tokens it has.

Importing this imports no torchtitan, so a job is checked before a process group exists.
"""

import logging
from pathlib import Path

from tokenizers import Tokenizer

from titanplans.training.data.reading import refusing


def default_tokenizer_path() -> str:
    """The folder of the committed tokenizer, for `[model] hf_assets_path` (4096 tokens, see docs/data.md)."""
    return str(Path(__file__).parent / "tokenizer")


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of the folder `path`, without the bos/eos handling that torchtitan adds.

    Raises:
        DataError: the folder or its tokenizer.json is missing, or the file is no tokenizer's.
    """
    with refusing(f"hf_assets_path = {path!r}: its tokenizer.json can't be read", _remedy()):
        return Tokenizer.from_str((Path(path) / "tokenizer.json").read_text(encoding="utf-8"))


def check_tokenizer(path: str) -> int:
    """How many tokens a model needs for the tokenizer of the folder `path`: one more than its largest id.

    It is loaded as the trainer does: tokenizer_config.json and chat_template.jinja, too, where they are there.

    Raises:
        DataError: the folder or its tokenizer.json is missing, or one of the files can't be used.
    """
    load_tokenizer(path)
    # Which imports torchtitan, so the device has to be settled by now.
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    log = logging.getLogger()
    level = log.level
    log.setLevel(logging.ERROR)  # which files it has found is said when training loads it
    try:
        files = "tokenizer.json, tokenizer_config.json or chat_template.jinja"
        with refusing(f"hf_assets_path = {path!r}: its {files} can't be used", _remedy()):
            tokenizer = HuggingFaceTokenizer.Config().build(tokenizer_path=path)
            return max(tokenizer.get_vocab().values(), default=-1) + 1  # ids may leave gaps
    finally:
        log.setLevel(level)


def _remedy() -> str:
    return f"give a folder with a tokenizer.json; the project's own is {default_tokenizer_path()!r}"
