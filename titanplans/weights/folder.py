"""A Hugging Face folder of weights: which tensors are in which of its files, and any part of one.

    model.safetensors                                    one file, or
    model.safetensors.index.json, model-0000N-of-M...    an index, and the files that it names

safetensors checks the headers of all files first, so that a damaged folder is refused before a value is read. Nothing is
unpickled, and an index names files of its own folder only; those may be links, as in the hub's cache.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from titanplans.errors import ModelError
from titanplans.text import counted, some
from titanplans.weights.lazy import Box, LazyTensor, slices

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor as a file's header describes it."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class Folder:
    """What `open_folder` returns.

    Attributes:
        path: the folder.
        stored: name -> its file, dtype and shape.
        bytes_read: bytes of values that `tensors` have read so far.
    """

    def __init__(self, path: Path, stored: Mapping[str, Stored]):
        self.path, self.stored = path, dict(stored)
        self.bytes_read = 0
        self._files: dict[Path, Any] = {}

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        """Name -> tensor, read in parts, each when it is asked for."""

        def lazy(name: str, stored: Stored) -> LazyTensor:
            return LazyTensor(name, stored.shape, stored.dtype, lambda box: self._read(name, stored, box))

        return {name: lazy(name, stored) for name, stored in self.stored.items()}

    def _read(self, name: str, stored: Stored, box: Box) -> torch.Tensor:
        try:
            if stored.file not in self._files:
                self._files[stored.file] = safe_open(stored.file, framework="pt")
            file = self._files[stored.file]
            if any(first >= last for first, last in box):
                return torch.empty([max(0, last - first) for first, last in box], dtype=stored.dtype)
            part = file.get_slice(name)[slices(box)] if box else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{stored.file} can't be read at {name}: {_reason(error)}") from error
        self.bytes_read += part.numel() * part.element_size()
        return part


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read and check the headers of a Hugging Face folder of safetensors.

    Args:
        path: a folder with model.safetensors, or model.safetensors.index.json and the files that it names.

    Raises:
        ModelError: there is no such folder, it holds pickles only, the index names a file or tensor that is missing or lies
            elsewhere, a file is damaged or cut short, or a tensor is in two files.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        raise ModelError(f"{folder} is not a directory: name the Hugging Face folder that holds the weights")
    index, single = folder / INDEX, folder / SINGLE
    if os.path.exists(index):
        named = _read_index(index)
        if os.path.exists(single) and SINGLE not in named.values():
            raise ModelError(f"{folder} holds {SINGLE}, and an index of other files: remove one of the two")
    elif os.path.exists(single):
        named = {}
    else:
        raise ModelError(_nothing(folder))
    stored: dict[str, Stored] = {}
    for file in dict.fromkeys(named.values()) if os.path.exists(index) else [SINGLE]:
        for name, entry in _read_header(folder / file).items():
            if name in stored:
                raise ModelError(
                    f"{folder}: {name} is in {stored[name].file.name} and in {file}: keep one of them"
                )
            stored[name] = entry
    wrong = [name for name, file in named.items() if name not in stored or stored[name].file.name != file]
    if wrong:
        raise ModelError(
            f"{index} names the file of {counted(len(wrong), 'tensor')} wrongly, first {wrong[0]} in {named[wrong[0]]}: the "
            "folder is incomplete or mixed from two; fetch it again"
        )
    return Folder(folder, stored)


def _read_index(index: Path) -> dict[str, str]:
    """Return tensor name -> file name."""
    if not index.is_file():
        raise ModelError(f"{index} is not a regular file")  # reading a pipe would wait
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{index} can't be read: {_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{index} is damaged: {_reason(error)}; fetch it again") from error
    named = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(named, dict) or not named:
        raise ModelError(f"{index} has no weight_map from names of tensors to files: fetch it again")
    for name, file in named.items():
        plain = isinstance(file, str) and file not in ("", ".", "..") and not set(file) & {"/", "\\", "\0"}
        if not plain or not file.endswith(".safetensors"):
            raise ModelError(
                f"{index} says that {name} is in {file!r}: an index names .safetensors files of its own folder only, "
                "without a path"
            )
    return named


def _read_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of a .safetensors file by name; safetensors checks its header, and its size, as it opens it."""
    if not file.exists():
        raise ModelError(
            f"{file} is not there, though the index names it: the folder is incomplete, fetch it"
        )
    if not file.is_file():
        raise ModelError(f"{file} is not a regular file")
    stored = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no dict
                entry = opened.get_slice(name)
                if (dtype := DTYPES.get(entry.get_dtype())) is None:
                    raise ModelError(
                        f"{file}: {name} has the type {entry.get_dtype()}, which no model here has"
                    )
                stored[name] = Stored(file, dtype, tuple(entry.get_shape()))
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged or cut short: {_reason(error)}; fetch it again") from error
    except OSError as error:
        raise ModelError(f"{file} can't be read: {_reason(error)}") from error
    return stored


def _nothing(folder: Path) -> str:
    """Return why a folder without safetensors is refused."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{folder} holds its weights as pickles ({some(pickles)}), which can run code when they are read: they are "
            "never read here. If you trust their origin, convert them to safetensors by transformers' from_pretrained "
            "and save_pretrained"
        )
    return f"{folder} holds neither {SINGLE} nor {INDEX}"


def _reason(error: Exception) -> str:
    return " ".join((getattr(error, "strerror", None) or str(error)).split())
