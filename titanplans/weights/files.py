"""The files of a Hugging Face folder, as one process writes them: safetensors whose values come one by one, config.json,
and the files of a tokenizer.
"""

import copy
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from titanplans.errors import ModelError, NotSaved
from titanplans.text import format_bytes
from titanplans.weights.folder import DTYPES

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt", "preprocessor_config.json",
    "processor_config.json", "generation_config.json",
)  # fmt: skip
"""What belongs to a tokenizer, and how a model is asked to generate."""
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""A chat template may also be in tokenizer_config.json."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    directory: Path,
    files: Mapping[str, Mapping[str, torch.Tensor]],
    values: Iterator[tuple[str, torch.Tensor]],
    seal: Callable[[Path], None],
) -> None:
    """Write files whose tensors are known by shape and dtype, and whose values come in any order.

    A file: 8 bytes with the length of the header, the header in JSON, the values in the order of the header
    (https://github.com/huggingface/safetensors#format). `seal` is called with each file as soon as it is whole, so that
    ranks that wait for the next tensor never wait for all files to reach the disk.
    """
    with ExitStack() as stack:
        places: dict[str, tuple[str, int]] = {}
        streams = {file: stack.enter_context((directory / file).open("wb")) for file in files}
        left = {file: len(tensors) for file, tensors in files.items()}
        for file, tensors in files.items():
            # Large elements first, so that each begins at a multiple of its size.
            names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name in names:
                start, end = end, end + tensors[name].nbytes
                shape, dtype = list(tensors[name].shape), _NAMES[tensors[name].dtype]
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            streams[file].write(len(text).to_bytes(8, "little") + text)
            places |= {name: (file, 8 + len(text) + header[name]["data_offsets"][0]) for name in names}
        for name, value in values:
            file, offset = places[name]
            streams[file].seek(offset)
            if value.numel():
                streams[file].write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
            left[file] -= 1
            if not left[file]:
                streams[file].close()
                seal(directory / file)


def write_config(
    directory: Path, plain: PreTrainedModel, config: PretrainedConfig, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Write config.json, with the class that `from_pretrained` makes and the dtype of its weights."""
    config = copy.deepcopy(config)
    config.architectures = [type(plain).__name__]
    found = Counter(dtype for dtype in dtypes.values() if dtype.is_floating_point)
    ((dtype, _),) = found.most_common(1)  # some may be kept in float32
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        if isinstance(each, PretrainedConfig):
            each.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(directory)


def copy_tokenizer(source: Path, directory: Path, chat_template: str | None = None) -> None:
    """Copy what there is of a tokenizer, with `chat_template` (Jinja) in place of its own; refuse a folder without any."""
    names = _TOKENIZER + (_TEMPLATES if chat_template is None else ())
    found = [source / name for name in names if (source / name).is_file()]
    if not found:
        raise ModelError(
            f"tokenizer = {str(source)!r}: there is no tokenizer.json and no other file of a tokenizer in it"
        )
    for path in found:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path} can't be read ({error.strerror})") from error
        (directory / path.name).write_bytes(content)
    if chat_template is None:
        return
    (directory / _TEMPLATES[0]).write_text(chat_template, encoding="utf-8")
    config = directory / "tokenizer_config.json"
    if config.is_file() and "chat_template" in (values := json.loads(config.read_text(encoding="utf-8"))):
        del values["chat_template"]
        config.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_full(directory: Path, needed: int) -> None:
    """Raise an error, before anything is written, if the disk has no room for `needed` bytes."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise NotSaved(
            f"{directory} has {format_bytes(free)} free, but {format_bytes(needed)} are to be written; "
            f"free {format_bytes(needed - free)}"
        )
