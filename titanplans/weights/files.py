"""Write the files of a Hugging Face folder in one process: safetensors (tensor by tensor), config.json, a tokenizer."""

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
from titanplans.hub import TEMPLATE_FILES, TOKENIZER_FILES
from titanplans.text import format_bytes
from titanplans.weights.folder import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    directory: Path,
    files: Mapping[str, Mapping[str, torch.Tensor]],
    values: Iterator[tuple[str, torch.Tensor]],
    seal: Callable[[Path], None],
) -> None:
    """Write safetensors files whose values arrive in any order.

    A file consists of 8 bytes with the length of the header, the header in JSON, and the values in the order of the header
    (https://github.com/huggingface/safetensors#format).

    Args:
        directory: the folder to write to.
        files: for each file name, the tensors on meta (with shape and dtype) by name.
        values: yields the name and the value of each tensor.
        seal: called with each file as soon as it is complete, to sync it to the disk.
    """
    # Files are synced one by one: other ranks wait for each tensor, and while rank 0 synced all files at the end, they
    # could time out.
    with ExitStack() as stack:
        offsets: dict[str, tuple[str, int]] = {}
        open_files = {file: stack.enter_context((directory / file).open("wb")) for file in files}
        remaining = {file: len(tensors) for file, tensors in files.items()}
        for file, tensors in files.items():
            # Large elements first, so that each tensor is aligned to its element size.
            names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name in names:
                start, end = end, end + tensors[name].nbytes
                shape, dtype = list(tensors[name].shape), _NAMES[tensors[name].dtype]
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            open_files[file].write(len(text).to_bytes(8, "little") + text)
            offsets |= {name: (file, 8 + len(text) + header[name]["data_offsets"][0]) for name in names}
        for name, value in values:
            file, offset = offsets[name]
            open_files[file].seek(offset)
            if value.numel():
                open_files[file].write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
            remaining[file] -= 1
            if not remaining[file]:
                open_files[file].close()
                seal(directory / file)


def write_config(
    directory: Path, plain: PreTrainedModel, config: PretrainedConfig, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Write config.json, with the class that `from_pretrained` builds and the dtype of most weights."""
    config = copy.deepcopy(config)
    config.architectures = [type(plain).__name__]
    counts = Counter(dtype for dtype in dtypes.values() if dtype.is_floating_point)
    ((dtype, _),) = counts.most_common(1)  # some tensors may stay in float32
    for config_ in (config, *(getattr(config, name) for name in config.sub_configs)):
        if isinstance(config_, PretrainedConfig):
            config_.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(directory)


def copy_tokenizer(source: Path, directory: Path, chat_template: str | None = None) -> None:
    """Copy the files of a tokenizer; `chat_template` (Jinja) replaces the tokenizer's template.

    Raises:
        ModelError: there is no file of a tokenizer, or a file can't be read.
    """
    names = TOKENIZER_FILES + (TEMPLATE_FILES if chat_template is None else ())
    paths = [source / name for name in names if (source / name).is_file()]
    if not paths:
        raise ModelError(
            f"tokenizer = {str(source)!r}: there is no tokenizer.json and no other file of a tokenizer in it"
        )
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path} can't be read ({error.strerror})") from error
        (directory / path.name).write_bytes(content)
    if chat_template is None:
        return
    (directory / TEMPLATE_FILES[0]).write_text(chat_template, encoding="utf-8")
    config = directory / "tokenizer_config.json"
    if config.is_file() and "chat_template" in (values := json.loads(config.read_text(encoding="utf-8"))):
        del values["chat_template"]
        config.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_full(directory: Path, needed: int) -> None:
    """Raise `NotSaved` if the disk has no room for `needed` bytes. Call this before anything is written."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise NotSaved(
            f"{directory} has {format_bytes(free)} of free space, but {format_bytes(needed)} have to be written; "
            f"free {format_bytes(needed - free)}"
        )
