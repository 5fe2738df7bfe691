"""`load_weights`: load a Hugging Face folder into a split model; each rank reads only the slices that it holds.

Names, shapes and dtypes are compared with the model before a value is read. Ranks communicate only if a folder has several
copies of tied weights, or if it is a repository of the Hugging Face Hub.
"""

import logging
import os
import time
from pathlib import Path
from typing import NamedTuple, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from titanplans.errors import ModelError
from titanplans.hub import Repository, local_folder, repository_of
from titanplans.modeling.build import build
from titanplans.modeling.initialize import Writer, initialize, named_tensors, tie
from titanplans.precision import nf4
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.split.objects import broadcast_object
from titanplans.text import some
from titanplans.weights.atomic import on_first_rank
from titanplans.weights.compare import check_tied_copies, describe_kinds, unify_tied
from titanplans.weights.folder import Folder, open_folder
from titanplans.weights.lazy import LazyTensor
from titanplans.weights.names import from_hf_names, multi_token_names

_logger = logging.getLogger(__name__)

UNEXPECTED = "unexpected, which the model does not have"
"""The kind of tensors in `Loaded.unexpected`, for `describe_kinds`."""


MULTI_TOKEN = "of multi-token prediction, which are not trained"
"""The kind of tensors in `Match.multi_token`, for `describe_kinds`."""


class Loaded(NamedTuple):
    """The result of `load_weights` on this rank."""

    tensors: int
    """The number of the model's tensors that were loaded."""

    bytes_read: int
    """Bytes of values that this rank has read."""

    seconds: float

    missing: tuple[str, ...]
    """The model's tensors that the folder lacks, which keep their values. There are none unless strict=False."""

    unexpected: tuple[str, ...]
    """The folder's tensors that the model does not have: layers of multi-token prediction, others that the model's class
    ignores, and with strict=False all others."""


class Match(NamedTuple):
    """A folder's tensors by parameter name."""

    tensors: dict[str, LazyTensor]
    """The tensors to read; of a group of tied tensors, only one."""
    tied_copies: dict[str, LazyTensor]
    """Further copies of tied tensors in the folder."""
    tied: dict[str, str]
    """Maps the name of a tied parameter to the name that it is tied to."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    multi_token: tuple[str, ...]
    """The names in `unexpected` that belong to layers of multi-token prediction."""


def load_weights(
    model: PreTrainedModel, folder: str | os.PathLike[str], *, strict: bool = True, seed: int = 0
) -> Loaded:
    """Load the weights of a Hugging Face folder into a model in place. Every rank calls it, and reads only its slices.

    Call it instead of `titanplans.modeling.initialize`, after the model has been parallelised and has memory
    (`manager.to_empty()`). Values are cast to each parameter's dtype. Buffers that are not in the folder are computed by the
    model's code, and tied weights are tied again.

    Args:
        model: a split or unsplit model that `titanplans.modeling.build` has built.
        folder: a folder with safetensors that have transformers' names: one file, or an index and several files. Or a
            repository of the Hugging Face Hub, "owner/name[@revision]", if there is no such folder: files that the cache
            of huggingface_hub lacks are downloaded, once on each machine.
        strict: raise an error if the folder lacks a tensor of the model, or has an unexpected tensor. Layers of
            multi-token prediction, and tensors that the model's class ignores, are allowed. If False, missing tensors keep
            their values.
        seed: the seed for tensors that no folder has, such as adapters; has to be the same on every rank.

    Returns:
        The number of tensors that were loaded, and the names of the missing and unexpected ones.

    Raises:
        ModelError: the folder is damaged, or holds another model; a tensor is on meta, or has 16 bits although the model's
            class keeps it in float32; or tied weights have different values.
        ModelError, ConfigError: the repository can't be downloaded; see `titanplans.hub.download`.
    """
    start = time.perf_counter()
    targets = named_tensors(model)
    repository = repository_of(str(folder))
    opened = open_folder(folder if repository is None else _downloaded(repository))
    match = match_folder(model, opened, strict=strict)
    _check_float32(model, {name: targets[name].dtype for name in match.tensors.keys() & targets.keys()})
    check_tied_copies(match.tied_copies, match.tensors, match.tied, opened.path)
    writer = Writer(model, targets, match.tied)
    for name, lazy in match.tensors.items():
        writer.write(name, cast(torch.Tensor, lazy))  # the functions that it calls accept lazy tensors
    # `others` are buffers that no folder has, and adapters. Codes and scales of NF4 have been written with their weight.
    others = writer.unwritten.keys() - match.tied.keys() - set(match.missing)
    others = {name for name in others if not name.endswith((nf4.CODES, nf4.SCALES))}
    initialize(model, seed=seed, only=others)
    tie(model, match.tied)
    seconds = time.perf_counter() - start
    loaded = Loaded(len(match.tensors), opened.bytes_read, seconds, match.missing, match.unexpected)
    not_loaded = describe_kinds(
        {
            "missing, which keep their values": loaded.missing,
            MULTI_TOKEN: match.multi_token,
            UNEXPECTED: [name for name in loaded.unexpected if name not in match.multi_token],
        }
    )
    _logger.info(
        f"read {loaded.tensors:,} tensors of {folder}: {loaded.bytes_read:,} bytes on this rank in {loaded.seconds:.2f} s"
        f"{'; ' * bool(not_loaded)}{not_loaded}"
    )
    return loaded


def _downloaded(repository: Repository) -> str:
    """Return the folder of the cache with a repository's weights, which are of the same commit on all ranks. Collective."""
    what, commit = f"load_weights({str(repository)!r})", ""

    def find_commit() -> None:
        nonlocal commit
        commit = Path(local_folder(str(repository), what)).name

    on_first_rank(find_commit, Path(str(repository)))
    pinned = repository._replace(revision=broadcast_object(commit))
    # All ranks of a machine may call this at the same time: huggingface_hub locks each file while it is downloaded. They do
    # not wait in a collective, which would time out before a large model is there.
    return local_folder(str(pinned), what, weights=True)


def match_folder(model: PreTrainedModel, folder: Folder, *, strict: bool = True) -> Match:
    """Compare names, shapes and dtypes of a folder's tensors with the model's, without reading a value.

    Args:
        model: the model, which may be on meta; see `load_weights`.
        folder: the result of `open_folder`.
        strict: see `load_weights`.

    Raises:
        ModelError: some tensors are missing, unexpected, or of another shape or dtype; the message names them.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise ModelError(
            f"{type(model).__name__} has no config of transformers, so the names of its tensors in a folder are unknown: "
            "give load_weights a model that modeling.build has built"
        )
    # Compare with the unsplit model, since a split model has other classes and names.
    plain = build(config)
    tensors, unexpected, ignored = from_hf_names(plain, folder.tensors)
    multi_token = multi_token_names(plain, unexpected, ignored)
    expected: dict[str, torch.Tensor] = plain.state_dict()
    tied = {name: source for name, source in plain.all_tied_weights_keys.items() if name in expected}
    mismatched = [
        f"{name} is {_describe_type(lazy)} in {folder.file_of(lazy.name)}, expected {_describe_type(expected[name])}"
        for name, lazy in tensors.items()
        if lazy.shape != expected[name].shape or not _is_castable(lazy.dtype, expected[name].dtype)
    ]
    tensors, tied_copies = unify_tied(tensors, tied)
    missing = [name for name in expected if name not in tensors and name not in tied]
    changes = describe_kinds(
        {
            "missing": missing if strict else (),
            "unexpected": [name for name in unexpected if strict and name not in {*ignored, *multi_token}],
            "of another shape or type": mismatched,
        }
    )
    if changes:
        raise ModelError(
            f"{folder.path} does not hold the weights of this model, {type(plain).__name__}: {changes}. Name the model's "
            "folder, or use the config.json that belongs to this folder"
        )
    return Match(tensors, tied_copies, tied, tuple(missing), tuple(unexpected), tuple(multi_token))


def _check_float32(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Raise a ModelError if the model has tensors in 16 bits that its class keeps in float32."""
    stays_float32 = {dtype: keeps_float32(model, dtype) for dtype in set(dtypes.values())}
    if narrow := [name for name, dtype in dtypes.items() if stays_float32[dtype](name)]:
        raise ModelError(
            f"{type(model).__name__} keeps {some(sorted(narrow))} in float32, but this model has it in "
            f"{str(dtypes[narrow[0]]).removeprefix('torch.')}: build it with modeling.build, or cast it to float32"
        )


def _is_castable(stored: torch.dtype, expected: torch.dtype) -> bool:
    """Return whether a cast keeps the meaning of values. A cast of 8-bit floats does not, since their scales are another
    tensor."""
    if stored.is_floating_point and stored.itemsize > 1:
        return expected.is_floating_point
    return stored == expected


def _describe_type(tensor: torch.Tensor | LazyTensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
