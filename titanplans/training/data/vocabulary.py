"""Where the tokenizer lies, whether it can be loaded, and how many tokens it has.

Nothing here imports torchtitan, so a job is checked before a process group or a device exists.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer

from titanplans.errors import DataError


def default_tokenizer_path() -> str:
    """The folder of the committed tokenizer, for `[model] hf_assets_path` (4096 tokens, see docs/data.md)."""
    return str(Path(__file__).parent / "tokenizer")


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of the folder `path`, without the bos/eos handling that torchtitan adds.

    Raises:
        DataError: the folder or its tokenizer.json is missing, or the file is no tokenizer's.
        Exception: `tokenizers`' own, for a tokenizer that contradicts itself.
    """
    remedy = f"give a folder with a tokenizer.json; the project's own is {default_tokenizer_path()!r}"
    # Read here first: for a file that it can't use, `tokenizers` raises a bare Exception.
    try:
        text = (Path(path) / "tokenizer.json").read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as error:  # no such folder, not a folder, no such file, not allowed
        raise DataError(
            f"hf_assets_path = {path!r}: no tokenizer.json can be read there ({error.strerror}); {remedy}"
        ) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise DataError(
            f"hf_assets_path = {path!r}: tokenizer.json is no tokenizer ({error}); {remedy}"
        ) from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or "vocab" not in model:
        raise DataError(
            f'hf_assets_path = {path!r}: tokenizer.json is no tokenizer (it has no "model" with a "vocab"); {remedy}'
        )
    return Tokenizer.from_str(text)


def check_tokenizer(path: str) -> int:
    """How many tokens the tokenizer of the folder `path` has, special ones included.

    Raises:
        DataError: the folder or its tokenizer.json is missing, or the file can't be read.
    """
    return load_tokenizer(path).get_vocab_size()
