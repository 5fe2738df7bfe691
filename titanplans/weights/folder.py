"""`open_folder`: a Hugging Face folder of weights, whose tensors can be read slice by slice.

    model.safetensors                                    one file, or
    model.safetensors.index.json, model-0000N-of-M...    an index, and the files that it names

The headers of all files are checked first, so that a damaged folder is refused before a value is read. Nothing is unpickled.
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


class TensorEntry(NamedTuple):
    """A tensor's entry in the header of a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class Folder:
    """A folder that `open_folder` has checked.

    Attributes:
        path: the folder.
        entries: file, dtype and shape of each tensor, by name.
        bytes_read: bytes of values that have been read from `tensors`.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry]):
        self.path, self.entries = path, dict(entries)
        self.bytes_read = 0
        self._files: dict[Path, Any] = {}

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        """The tensors by name. A tensor is read when its values are needed."""

        def lazy(name: str, entry: TensorEntry) -> LazyTensor:
            return LazyTensor(name, entry.shape, entry.dtype, lambda box: self._read(name, entry, box))

        return {name: lazy(name, entry) for name, entry in self.entries.items()}

    def file_of(self, name: str) -> str:
        """Return the name of the file that holds a tensor; the folder's path if it was converted from several tensors."""
        return self.entries[name].file.name if name in self.entries else str(self.path)

    def _read(self, name: str, entry: TensorEntry, box: Box) -> torch.Tensor:
        try:
            if entry.file not in self._files:
                self._files[entry.file] = safe_open(entry.file, framework="pt")
            file = self._files[entry.file]
            if any(first >= last for first, last in box):
                return torch.empty([max(0, last - first) for first, last in box], dtype=entry.dtype)
            values = file.get_slice(name)[slices(box)] if box else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{entry.file} can't be read at {name}: {_reason(error)}") from error
        self.bytes_read += values.numel() * values.element_size()
        return values


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read and check the headers of a Hugging Face folder of safetensors.

    Args:
        path: a folder with model.safetensors, or with model.safetensors.index.json and the files that it names.

    Raises:
        ModelError: the folder does not exist or holds only pickles; the index names a missing file or tensor, or a file of
            another folder; a file is damaged or truncated; or a tensor is in two files.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        raise ModelError(f"{folder} is not a directory: name the Hugging Face folder that holds the weights")
    index, single = folder / INDEX, folder / SINGLE
    if os.path.exists(index):
        file_names = _read_index(index)
        if os.path.exists(single) and SINGLE not in file_names.values():
            raise ModelError(f"{folder} holds {SINGLE}, and an index of other files: remove one of the two")
    elif os.path.exists(single):
        file_names = {}
    else:
        raise ModelError(_describe_missing(folder))
    entries: dict[str, TensorEntry] = {}
    for file in dict.fromkeys(file_names.values()) if os.path.exists(index) else [SINGLE]:
        for name, entry in _read_header(folder / file).items():
            if name in entries:
                raise ModelError(
                    f"{folder}: {name} is in {entries[name].file.name} and in {file}: keep one of them"
                )
            entries[name] = entry
    wrong = [
        name for name, file in file_names.items() if name not in entries or entries[name].file.name != file
    ]
    if wrong:
        raise ModelError(
            f"{index} names the wrong file for {counted(len(wrong), 'tensor')}, e.g. {file_names[wrong[0]]} for {wrong[0]}: "
            "the folder is incomplete, or mixes files of two models; download it again"
        )
    return Folder(folder, entries)


def open_file(path: Path) -> Folder:
    """Read and check the header of one safetensors file, whatever its name.

    Raises:
        ModelError: the file does not exist, or is damaged or truncated.
    """
    return Folder(path.parent, _read_header(path))


def _read_index(index: Path) -> dict[str, str]:
    """Return the names of the files by tensor name."""
    if not index.is_file():
        raise ModelError(f"{index} is not a regular file")  # reading a pipe would block
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{index} can't be read: {_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{index} is damaged: {_reason(error)}; download it again") from error
    file_names = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(file_names, dict) or not file_names:
        raise ModelError(f"{index} has no weight_map from names of tensors to files; download it again")
    # An index may name only files of this folder, so that it can't point to files elsewhere. These files may be symbolic
    # links, as in the Hub's cache.
    for name, file in file_names.items():
        is_name = isinstance(file, str) and file not in ("", ".", "..") and not set(file) & {"/", "\\", "\0"}
        if not is_name or not file.endswith(".safetensors"):
            raise ModelError(
                f"{index} says that {name} is in {file!r}: an index may name only .safetensors files of its own folder, "
                "without a path"
            )
    return file_names


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the entries of a .safetensors file by name. safetensors checks header and file size when it opens the file."""
    if not file.exists():
        raise ModelError(f"{file} does not exist, although the index names it: download the folder again")
    if not file.is_file():
        raise ModelError(f"{file} is not a regular file")
    entries = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no dict
                slice_ = opened.get_slice(name)
                if (dtype := DTYPES.get(slice_.get_dtype())) is None:
                    raise ModelError(
                        f"{file}: {name} has the dtype {slice_.get_dtype()}, which is not supported"
                    )
                entries[name] = TensorEntry(file, dtype, tuple(slice_.get_shape()))
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged or truncated: {_reason(error)}; download it again") from error
    except OSError as error:
        raise ModelError(f"{file} can't be read: {_reason(error)}") from error
    return entries


def _describe_missing(folder: Path) -> str:
    """Return the error message for a folder without safetensors."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{folder} holds its weights as pickles ({some(pickles)}), which are not read here, since they can run code. If "
            "you trust their origin, convert them to safetensors with transformers' from_pretrained and save_pretrained"
        )
    return f"{folder} holds neither {SINGLE} nor {INDEX}"


def _reason(error: Exception) -> str:
    return " ".join((getattr(error, "strerror", None) or str(error)).split())
