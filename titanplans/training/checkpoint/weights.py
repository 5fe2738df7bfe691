"""Read the weights of a checkpoint, a Hugging Face folder or peft's files as lazy tensors by the model's parameter names."""

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from titanplans import modeling
from titanplans.errors import ConfigError
from titanplans.precision.nf4 import CODES, SCALES, is_quantised, quantise
from titanplans.training.checkpoint.manifest import MANIFEST, damage, read_manifest
from titanplans.training.checkpoint.match import (
    compared_fields,
    describe_model_changes,
    tensors_of,
    truncated,
)
from titanplans.training.checkpoint.storage import CheckpointReader, Planner
from titanplans.weights.adapters import WEIGHTS, check_adapter, peft_name, trained_names
from titanplans.weights.compare import check_tied_copies, describe_kinds
from titanplans.weights.folder import open_folder
from titanplans.weights.lazy import LazyTensor, apply_lazily, lazy_tensors
from titanplans.weights.load import UNEXPECTED, match_folder

_logger = logging.getLogger(__name__)


def checkpoint_weights(checkpoint: Path, what: str) -> dict[str, LazyTensor]:
    """Return the weights of a distributed checkpoint.

    Args:
        checkpoint: the folder step-N.
        what: the beginning of an error's message.

    Raises:
        ConfigError: `checkpoint` is not a distributed checkpoint, or is damaged. Reading a tensor may raise this error,
            too.
    """
    if not os.path.isfile(checkpoint / ".metadata"):
        is_hf_folder = os.path.isfile(checkpoint / "config.json")
        hint = "it already is a Hugging Face folder" if is_hf_folder else "name a folder step-N"
        raise ConfigError(f"{what}: it holds no distributed checkpoint (.metadata); {hint}")
    reader = CheckpointReader(checkpoint)
    metadata = reader.read_metadata()
    has_manifest = os.path.isfile(checkpoint / MANIFEST)
    if (fault := damage(checkpoint) if has_manifest else truncated(checkpoint, metadata)) is not None:
        raise ConfigError(f"{what}: {fault}; take another checkpoint")
    tensors = tensors_of(metadata.state_dict_metadata)

    def read(name: str) -> torch.Tensor:
        state = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype)}
        try:
            dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=True)
        except CheckpointException as error:
            raise ConfigError(f"{what}: {name} in it is damaged; take another checkpoint") from error
        return state[name]

    return lazy_tensors(tensors, read)


def hf_folder_weights(plain: PreTrainedModel, folder: Path, what: str) -> dict[str, LazyTensor]:
    """Return the weights of a Hugging Face folder by parameter name; tied weights have an entry under each of their names.

    Args:
        plain: the unsplit model, on meta.
        folder: the folder.
        what: the beginning of an error's message.

    Raises:
        ModelError: the folder is damaged, holds another model, or has different values for tied weights.
    """
    match = match_folder(plain, open_folder(folder))
    check_tied_copies(match.tied_copies, match.tensors, match.tied, what)
    others = [name for name in match.unexpected if name not in match.multi_token]
    if left_out := describe_kinds({UNEXPECTED: others}):
        _logger.info(f"{folder}: {left_out}")
    return {name: match.tensors[match.tied.get(name, name)] for name in plain.state_dict()}


def adapter_weights(model: nn.Module, folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of peft's files in `folder`, by the names of `model`'s parameters; the model has adapters.

    Raises:
        ModelError: the files are damaged, or do not fit the model's adapters.
    """
    check_adapter(model, folder)

    def read(name: str) -> torch.Tensor:
        with safe_open(folder / WEIGHTS, "pt") as file:
            return file.get_tensor(peft_name(name))

    state = model.state_dict(keep_vars=True)
    return lazy_tensors({name: state[name] for name in trained_names(model)}, read)


def base_weights(
    plain: PreTrainedModel, base: Path, what: str, overrides: Collection[str] = ()
) -> dict[str, LazyTensor]:
    """Return the base weights for adapters, from a Hugging Face folder or a distributed checkpoint.

    Args:
        plain: the unsplit model without adapters, on meta.
        base: the folder of the base weights.
        what: the beginning of an error's message.
        overrides: fields of the model's config that may differ.

    Raises:
        ConfigError, ModelError: the weights are damaged, or belong to another model.
    """
    fields: Mapping[str, Any] | None = None
    if os.path.isfile(base / ".metadata"):
        weights = checkpoint_weights(base, what)
        fields = read_manifest(base).model if os.path.isfile(base / MANIFEST) else None
    else:
        weights = hf_folder_weights(plain, base, what)
        if os.path.isfile(base / "config.json"):
            fields = compared_fields(modeling.load_config_file(base))
    if fields is not None:
        changes = describe_model_changes(fields, plain.config, overrides, token_ids=False)
        if changes:
            raise ConfigError(
                f"{what}: it is of another model ({changes}); name the base weights that the adapters were trained on"
            )
    return weights


def add_base_weights(
    trained: Mapping[str, LazyTensor],
    base: Mapping[str, LazyTensor],
    adapters: Mapping[str, nn.Module],
    least_dtype: torch.dtype | None,
) -> dict[str, LazyTensor]:
    """Return the trained tensors and the base weights. Base weights that the job kept in NF4 are quantised again.

    Args:
        trained: tensors of adapters and of other trained modules; they replace base weights of the same name.
        base: the base weights, by the names of the model without adapters.
        adapters: the modules with adapters, by name.
        least_dtype: cast floating-point base weights to a dtype at least as wide as this one; None: do not cast.
    """
    tensors = {}
    quantised = {f"{name}.weight": name for name, adapter in adapters.items() if is_quantised(adapter)}
    for name, tensor in base.items():
        if (module := quantised.get(name)) is not None:
            # Rounded as in the job: the adapters were trained on the rounded weights.
            codes, scales = apply_lazily(quantise, [tensor])
            tensors |= {f"{module}.{CODES}": codes, f"{module}.{SCALES}": scales}
        elif least_dtype is not None and tensor.dtype.is_floating_point:
            tensors[name] = tensor.to(torch.promote_types(tensor.dtype, least_dtype))
        else:
            tensors[name] = tensor
    return {**tensors, **trained}
