"""A Hugging Face folder of weights: which tensors are in which of its files, and any part of one.

    model.safetensors                                    one file, or
    model.safetensors.index.json, model-0000N-of-M...    an index, and the files that it names

Headers are read and checked first, so that a damaged folder is refused before a value is read. Nothing is unpickled, and
an index names files of its own folder alone; those may be links, as they are in the hub's cache.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from titanplans.errors import ModelError
from titanplans.weights.lazy import Box, LazyTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own
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
        stored: name -> where and what it is.
        bytes_read: bytes of values that `tensors` have read so far.
    """

    def __init__(self, path: Path, stored: Mapping[str, Stored]):
        self.path, self.stored = path, dict(stored)
        self.bytes_read = 0
        self._files: dict[Path, Any] = {}

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        """Name -> tensor, of which a part is read when it is asked for."""

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
            part = (
                file.get_slice(name)[tuple(slice(first, last) for first, last in box)]
                if box
                else file.get_tensor(name)
            )
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{stored.file} can't be read at {name}: {_reason(error)}") from error
        self.bytes_read += part.numel() * part.element_size()
        return part


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read and check the headers of a Hugging Face folder of safetensors.

    Args:
        path: a folder with model.safetensors, or model.safetensors.index.json and the files that it names.

    Raises:
        ModelError: there is no such folder, it holds pickles alone, the index names what is not there or lies elsewhere, a
            file is damaged or cut short, or a tensor is in two files.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        raise ModelError(f"{folder} is no folder: name the Hugging Face folder that holds the weights")
    index, single = folder / INDEX, folder / SINGLE
    if os.path.exists(index):
        named = _read_index(index)
        if os.path.exists(single) and SINGLE not in named.values():
            raise ModelError(
                f"{folder} holds {SINGLE}, and an index of other files: which is the model? Remove one of the two"
            )
    elif os.path.exists(single):
        named = {}
    else:
        raise ModelError(_nothing(folder))
    stored: dict[str, Stored] = {}
    for file in dict.fromkeys(named.values()) if os.path.exists(index) else [SINGLE]:
        for name, entry in _read_header(folder / file).items():
            if name in stored:
                raise ModelError(
                    f"{folder}: {name} is in {stored[name].file.name} and in {file}: which one holds? Write the folder anew"
                )
            stored[name] = entry
    wrong = [name for name, file in named.items() if name not in stored or stored[name].file.name != file]
    if wrong:
        raise ModelError(
            f"{index} says that {wrong[0]} is in {named[wrong[0]]}, and it is not{_more(len(wrong) - 1, 'tensor')}: "
            "the folder is incomplete or mixed from two; fetch it again"
        )
    return Folder(folder, stored)


def _read_index(index: Path) -> dict[str, str]:
    """Return tensor name -> file name."""
    values = _json(_bytes(index), index)
    named = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(named, dict) or not named:
        raise ModelError(f"{index} has no weight_map from names of tensors to files: fetch it again")
    for name, file in named.items():
        plain = isinstance(file, str) and file not in ("", ".", "..") and not set(file) & {"/", "\\", "\0"}
        if not plain or not file.endswith(".safetensors"):
            raise ModelError(
                f"{index} says that {name} is in {file!r}: an index names .safetensors of its own folder alone, without a "
                "path"
            )
    return named


def _read_header(file: Path) -> dict[str, Stored]:
    """Return what the header of a .safetensors file says, once it is known to be right."""
    if not file.exists():
        raise ModelError(
            f"{file} is not there, though the index names it: the folder is incomplete, fetch it"
        )
    if not file.is_file():
        raise ModelError(f"{file} is no file")  # a pipe, which would be waited for
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise ModelError(
                    f"{file} is no safetensors file, or is cut short: it has {size:,} bytes, and its first eight announce a "
                    f"header of {length:,}"
                )
            header = stream.read(length)
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}") from error
    values = _json(header, file)
    if not isinstance(values, dict):
        raise ModelError(f"{file} is damaged: its header is no JSON object")
    values.pop("__metadata__", None)
    stored, places = {}, []
    for name, entry in values.items():
        dtype, shape, (start, stop) = _entry(file, name, entry)
        stored[name] = Stored(file, dtype, shape)
        places.append((start, stop, name))
    end, last = 0, "the header"
    for start, stop, name in sorted(places):
        if start != end:
            what = f"overlaps with {last}" if start < end else f"leaves a gap behind {last}"
            raise ModelError(f"{file} is damaged: {name} {what} (offset {start:,}, expected {end:,})")
        end, last = stop, name
    if (found := size - 8 - length) != end:
        raise ModelError(
            f"{file} is {'cut short' if found < end else 'damaged'}: its tensors take {end:,} bytes behind the header, and "
            f"it has {found:,}{f'; the last tensor is {last}' if stored else ''}; fetch it again"
        )
    return stored


def _entry(file: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    """Return dtype, shape and offsets of a tensor."""

    def naturals(values: Any) -> list[int]:
        right = isinstance(values, list) and all(
            type(value) is int and 0 <= value < 2**63 for value in values
        )
        return values if right else [-1]

    if not isinstance(entry, dict) or (shape := naturals(entry.get("shape"))) == [-1]:
        raise ModelError(f"{file} is damaged: its header gives {name} no shape")
    if len(offsets := naturals(entry.get("data_offsets"))) != 2:
        raise ModelError(f"{file} is damaged: its header gives {name} no place")
    if (dtype := DTYPES.get(str(entry.get("dtype")))) is None:
        raise ModelError(f"{file}: {name} has the type {entry.get('dtype')!r}, which no model here has")
    if (needed := math.prod(shape) * dtype.itemsize) != offsets[1] - offsets[0]:
        raise ModelError(
            f"{file} is damaged: {name}, {tuple(shape)} of {entry['dtype']}, takes {needed:,} bytes, and its header gives "
            f"it {offsets[1] - offsets[0]:,}"
        )
    return dtype, tuple(shape), (offsets[0], offsets[1])


def _bytes(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise ModelError(f"{file} is no file")
        if (size := file.stat().st_size) > _HEADER_LIMIT:
            raise ModelError(f"{file} has {size:,} bytes, and an index has {_HEADER_LIMIT:,} at most")
        return file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}") from error


def _json(text: bytes, file: Path) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ModelError(f"{file} is damaged: it names {twice} twice")
        return values

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is damaged: {_reason(error)}") from error


def _nothing(folder: Path) -> str:
    """Why a folder without safetensors can't be taken."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{folder} holds its weights as pickles ({pickles[0]}{_more(len(pickles) - 1, 'file')}), which can run code "
            "when they are read: they are never read here. Where you trust their origin, write them anew as safetensors, by "
            "transformers' from_pretrained and save_pretrained"
        )
    return f"{folder} holds neither {SINGLE} nor {INDEX}"


def _more(count: int, what: str) -> str:
    return f", and {count} more {what}{'s' if count > 1 else ''}" if count else ""


def _reason(error: Exception) -> str:
    return " ".join((getattr(error, "strerror", None) or str(error)).split())
