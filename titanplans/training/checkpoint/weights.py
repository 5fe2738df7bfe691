"""Where an export reads weights: a distributed checkpoint, a Hugging Face folder, peft's files; and adapters on a base.

Each is the tensors by the model's own names, which one process reads whole, one by one.
"""

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
from titanplans.training.checkpoint.card import CARD, damage, read_card
from titanplans.training.checkpoint.match import model_card, other_model, tensors_of, truncated
from titanplans.training.checkpoint.storage import CheckpointReader, Planner
from titanplans.weights.adapters import WEIGHTS, check_adapter, peft_name, trained_names
from titanplans.weights.compare import check_copies, in_words
from titanplans.weights.folder import open_folder
from titanplans.weights.lazy import LazyTensor, computed, lazily
from titanplans.weights.load import NO_PLACE, match_folder

_logger = logging.getLogger(__name__)


def of_checkpoint(checkpoint: Path, what: str) -> dict[str, LazyTensor]:
    """Return the weights of a step-N folder.

    Raises:
        ConfigError: it is none, or damaged; begins with `what`. Reading does, too.
    """
    if not os.path.isfile(checkpoint / ".metadata"):
        is_published = os.path.isfile(checkpoint / "config.json")
        hint = "it already is a Hugging Face folder" if is_published else "name a step-N folder"
        raise ConfigError(f"{what}: it holds no distributed checkpoint (.metadata); {hint}")
    reader = CheckpointReader(checkpoint)
    metadata = reader.read_metadata()
    has_card = os.path.isfile(checkpoint / CARD)
    if (wrong := damage(checkpoint) if has_card else truncated(checkpoint, metadata)) is not None:
        raise ConfigError(f"{what}: {wrong}; take another checkpoint")
    tensors = tensors_of(metadata.state_dict_metadata)

    def read(name: str) -> torch.Tensor:
        state = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype)}
        try:
            dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=True)
        except CheckpointException as error:
            raise ConfigError(f"{what}: {name} in it is damaged; take another checkpoint") from error
        return state[name]

    return lazily(tensors, read)


def of_folder(plain: PreTrainedModel, folder: Path, what: str) -> dict[str, LazyTensor]:
    """Return the tensors of a Hugging Face folder by the names of the model `plain`, tied ones under each.

    Raises:
        ModelError: it is damaged, of another model, or has two values of tied weights.
    """
    match = match_folder(plain, open_folder(folder))
    check_copies(match.again, match.tensors, match.tied, what)
    if left_out := in_words({NO_PLACE: match.unexpected}):
        _logger.info(f"{folder}: {left_out}")
    return {name: match.tensors[match.tied.get(name, name)] for name in plain.state_dict()}


def of_adapter(model: nn.Module, folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of peft's files in `folder`, by the names of `model`, which has such adapters.

    Raises:
        ModelError: they are of other adapters, or damaged.
    """
    check_adapter(model, folder)

    def read(name: str) -> torch.Tensor:
        with safe_open(folder / WEIGHTS, "pt") as file:
            return file.get_tensor(peft_name(name))

    state = model.state_dict(keep_vars=True)
    return lazily({name: state[name] for name in trained_names(model)}, read)


def of_base(
    plain: PreTrainedModel, base: Path, what: str, overrides: Collection[str] = ()
) -> dict[str, LazyTensor]:
    """Return the base weights of adapters of the model `plain`, from a Hugging Face folder or a checkpoint, whose
    config may differ in the fields `overrides`.

    Raises:
        ConfigError, ModelError: it is damaged, or of another model.
    """
    theirs: Mapping[str, Any] | None = None
    if os.path.isfile(base / ".metadata"):
        found = of_checkpoint(base, what)
        theirs = read_card(base).model if os.path.isfile(base / CARD) else None
    else:
        found = of_folder(plain, base, what)
        if os.path.isfile(base / "config.json"):
            theirs = model_card(modeling.load_config_file(base))
    if theirs is not None and (differing := other_model(theirs, plain.config, overrides, token_ids=False)):
        raise ConfigError(
            f"{what}: it is of another model ({differing}); name the one that the adapters were trained on"
        )
    return found


def with_base(
    own: Mapping[str, LazyTensor],
    base: Mapping[str, LazyTensor],
    adapters: Mapping[str, nn.Module],
    least: torch.dtype | None,
) -> dict[str, LazyTensor]:
    """Return the weights of `base` with those of `own` in their place; weights that the job kept in NF4 are rounded alike.

    Args:
        own: of adapters, and of other trained modules.
        base: by the names of the model without adapters.
        adapters: the modules with adapters, by name.
        least: of the base's floating-point tensors at least this dtype; None: as they are.
    """
    tensors = {}
    small = {f"{owner}.weight": owner for owner, adapter in adapters.items() if is_quantised(adapter)}
    for name, tensor in base.items():
        if (owner := small.get(name)) is not None:
            codes, scales = computed(quantise, [tensor])
            tensors |= {f"{owner}.{CODES}": codes, f"{owner}.{SCALES}": scales}
        elif least is not None and tensor.dtype.is_floating_point:
            tensors[name] = tensor.to(torch.promote_types(tensor.dtype, least))
        else:
            tensors[name] = tensor
    return {**tensors, **own}
