"""From a Hugging Face folder into a model that is already split: every rank reads its own parts, and nothing else.

The tensors of a folder, and their names, are compared with the model before a value is read. No communication, but where
a folder has two values for tied weights.
"""

import logging
import os
import time
from typing import NamedTuple, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from titanplans.errors import ModelError
from titanplans.modeling.build import build
from titanplans.modeling.initialize import Writer, initialize, named_tensors, tie
from titanplans.precision import nf4
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.text import some
from titanplans.weights.compare import check_copies, in_words, once
from titanplans.weights.folder import Folder, open_folder
from titanplans.weights.lazy import LazyTensor
from titanplans.weights.names import from_published

_logger = logging.getLogger(__name__)

NO_PLACE = "of it not in the model, which a folder saved from the model lacks"
"""Of a folder's tensors: `Loaded.unexpected` in words."""


class Loaded(NamedTuple):
    """What `load_weights` has done on this rank."""

    tensors: int
    """Tensors of the model that got values."""

    bytes_read: int
    """Bytes of values that this rank has read."""

    seconds: float

    missing: tuple[str, ...]
    """Tensors of the model that the folder lacks: none unless strict=False. They have the values that they had."""

    unexpected: tuple[str, ...]
    """Tensors of the folder for which the model has no place, which a folder saved from it lacks: those that its class
    leaves out, such as layers of multi-token prediction, and others only with strict=False."""


class Match(NamedTuple):
    """A folder's tensors by the names of a model."""

    tensors: dict[str, LazyTensor]
    """What to read: a tied weight once."""
    again: dict[str, LazyTensor]
    """The folder's other copies of tied weights."""
    tied: dict[str, str]
    """Tied parameter -> the one that it is tied to."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_weights(
    model: PreTrainedModel, folder: str | os.PathLike[str], *, strict: bool = True, seed: int = 0
) -> Loaded:
    """Give a model the weights of a Hugging Face folder, in place; every rank calls it, and reads its parts alone.

    It takes the place of `titanplans.modeling.initialize`: call it after the model was parallelised and given memory
    (`manager.to_empty()`). Values are cast to each parameter's dtype. Buffers that a folder does not hold get their values
    from the model's own code. Tied weights are tied again.

    Args:
        model: as `titanplans.modeling.build` made it, split in any way or not at all.
        folder: safetensors with transformers' published names: one file, or an index of many.
        strict: whether it is an error that the folder lacks a tensor of the model or holds one more, except those that the
            model's class leaves out. If not, what it lacks keeps its value.
        seed: for the tensors that no folder holds, such as adapters; the same on every rank.

    Returns:
        The tensors that were read, and those that were not.

    Raises:
        ModelError: the folder is damaged or of another model; a tensor is still on the meta device, or has 16 bits where
            the model's class keeps float32; tied weights have two values.
    """
    start = time.perf_counter()
    targets = named_tensors(model)
    opened = open_folder(folder)
    match = match_folder(model, opened, strict=strict)
    _check_kept(model, {name: targets[name].dtype for name in match.tensors.keys() & targets.keys()})
    check_copies(match.again, match.tensors, match.tied, opened.path)
    writer = Writer(model, targets, match.tied)
    for name, lazy in match.tensors.items():
        writer.write(name, cast(torch.Tensor, lazy))  # functions on tensors take lazy ones
    more = writer.left.keys() - match.tied.keys() - set(match.missing)
    more = {name for name in more if not name.endswith((nf4.CODES, nf4.SCALES))}
    initialize(model, seed=seed, only=more)  # buffers that no folder holds, and adapters
    tie(model, match.tied)
    seconds = time.perf_counter() - start
    loaded = Loaded(len(match.tensors), opened.bytes_read, seconds, match.missing, match.unexpected)
    left = in_words(
        {
            "of the model not in it, which keep their values": loaded.missing,
            NO_PLACE: loaded.unexpected,
        }
    )
    _logger.info(
        f"read {loaded.tensors:,} tensors of {folder}: {loaded.bytes_read:,} bytes on this rank in {loaded.seconds:.2f} s"
        f"{'; ' * bool(left)}{left}"
    )
    return loaded


def match_folder(model: PreTrainedModel, folder: Folder, *, strict: bool = True) -> Match:
    """Compare the tensors of a folder with the model's: names, shapes and dtypes. No value is read.

    Args:
        model: as for `load_weights`; it may lie on meta.
        folder: as `open_folder` returns it.
        strict: as for `load_weights`.

    Raises:
        ModelError: with all that differs: names that are missing or unknown, and tensors of another shape or dtype.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise ModelError(
            f"{type(model).__name__} has no config of transformers, so which names it has in a folder is not known: "
            "give load_weights the model that modeling.build made"
        )
    # The model as it is published: a split one has other classes, and other names.
    plain = build(config)
    tensors, unexpected, left_out = from_published(plain, folder.tensors)
    expected: dict[str, torch.Tensor] = plain.state_dict()
    tied = {name: source for name, source in plain.all_tied_weights_keys.items() if name in expected}
    wrong = [
        f"{name} is {_kind(lazy)} in {folder.stored[lazy.name].file.name if lazy.name in folder.stored else folder.path}, "
        f"expected {_kind(expected[name])}"
        for name, lazy in tensors.items()
        if lazy.shape != expected[name].shape or not _castable(lazy.dtype, expected[name].dtype)
    ]
    tensors, again = once(tensors, tied)
    missing = [name for name in expected if name not in tensors and name not in tied]
    differing = in_words(
        {
            "of the model not in it": missing if strict else (),
            "of it not in the model": [name for name in unexpected if strict and name not in left_out],
            "of another shape or type": wrong,
        }
    )
    if differing:
        raise ModelError(
            f"{folder.path} does not hold the weights of this model, {type(plain).__name__}: {differing}. Name its own "
            "folder, or take the config.json that belongs to this one"
        )
    return Match(tensors, again, tied, tuple(missing), tuple(unexpected))


def _check_kept(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Refuse a model that has in 16 bits what its class keeps in float32."""
    keeps = {dtype: keeps_float32(model, dtype) for dtype in set(dtypes.values())}
    if narrow := [name for name, dtype in dtypes.items() if keeps[dtype](name)]:
        raise ModelError(
            f"{type(model).__name__} keeps {some(sorted(narrow))} in float32, and this model has it in "
            f"{str(dtypes[narrow[0]]).removeprefix('torch.')}: build it with modeling.build, or cast it to float32"
        )


def _castable(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast keeps the values: 8-bit floats have their scales in another tensor."""
    if stored.is_floating_point and stored.itemsize > 1:
        return wanted.is_floating_point
    return stored == wanted


def _kind(tensor: torch.Tensor | LazyTensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
