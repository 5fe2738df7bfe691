"""Layers of multi-token prediction: a checkpoint keeps them in a safetensors file, since transformers' classes lack them.

These layers are neither loaded into a model nor trained. A job copies them from the folder or checkpoint that its weights
were loaded from into each of its checkpoints. An export copies them into the exported folder, under the same names.
"""

import math
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from titanplans.disk import sync
from titanplans.text import counted
from titanplans.training.checkpoint.manifest import file_checksum, read_manifest
from titanplans.weights.files import write_safetensors
from titanplans.weights.folder import Folder, open_file, open_folder
from titanplans.weights.lazy import LazyTensor
from titanplans.weights.load import match_folder

FILE = "multi_token_prediction.safetensors"
"""The file in a folder step-N."""


class MultiTokenLayers(NamedTuple):
    """The tensors of multi-token prediction in a Hugging Face folder or in a folder step-N."""

    source: Path
    """The folder."""
    names: tuple[str, ...]

    def describe(self) -> str:
        """Return a sentence about the number of tensors and what is done with them."""
        return f"{counted(len(self.names), 'tensor')} of multi-token prediction are kept unchanged, and not trained"

    @property
    def nbytes(self) -> int:
        """The size of the tensors in bytes."""
        return sum(math.prod(lazy.shape) * lazy.dtype.itemsize for lazy in self.tensors().values())

    def tensors(self) -> dict[str, LazyTensor]:
        """Return the tensors by their names in a Hugging Face folder.

        Raises:
            ModelError: a file is damaged.
        """
        tensors = _open(self.source).tensors
        return {name: tensors[name] for name in self.names}


def find_layers(source: Path, plain: PreTrainedModel) -> MultiTokenLayers | None:
    """Return the tensors of multi-token prediction in a Hugging Face folder or in a folder step-N; None if there are none.

    Args:
        source: the folder.
        plain: the unsplit model to which the folder's weights belong, on meta.

    Raises:
        ModelError: a file is damaged, or a Hugging Face folder holds another model.
    """
    names: Collection[str] = ()
    if (source / FILE).is_file():
        names = open_file(source / FILE).entries
    elif not (source / ".metadata").is_file():
        names = match_folder(plain, open_folder(source)).multi_token
    return MultiTokenLayers(source, tuple(names)) if names else None


def write_layers(layers: MultiTokenLayers, directory: Path) -> tuple[int, str]:
    """Write the unchanged tensors to FILE in `directory`; return the file's size and checksum, as in `Manifest.files`.

    If the source is a folder step-N, its file is hard-linked, so that all checkpoints of a job share one file on the disk.

    Raises:
        OSError: they can't be written.
        ModelError: the source is damaged.
    """
    source, target = layers.source / FILE, directory / FILE
    if source.is_file():
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, target)
        sync(target)
        return read_manifest(layers.source).files[FILE]
    tensors = layers.tensors()
    meta = {name: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta") for name, lazy in tensors.items()}
    write_safetensors(directory, {FILE: meta}, ((name, lazy.read()) for name, lazy in tensors.items()), sync)
    return target.stat().st_size, file_checksum(target)


def _open(source: Path) -> Folder:
    return open_file(source / FILE) if (source / FILE).is_file() else open_folder(source)
