"""Checkpoints of split models in a user's own loop: `save_checkpoint`, and `load_checkpoint`, also into other degrees."""

import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    weights: bool = True,
) -> None:
    """Save the weights and the optimizer's state in torch's distributed format. Collective.

    Each rank writes its shards of the full tensors, so a model that is split at other degrees, or unsplit, can load them.

    Args:
        folder: the folder to write; it is created if it does not exist.
        model: a split or unsplit model.
        optimizer: the optimizer of `model`.
        weights: whether to save the weights, too. False: save only the optimizer's state.
    """
    dcp.save(_state(model, optimizer, weights), checkpoint_id=folder)


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    weights: bool = True,
) -> None:
    """Load a folder of `save_checkpoint` into `model` and `optimizer`, in place. Collective."""
    state = _state(model, optimizer, weights)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if weights:
        set_model_state_dict(model, state["model"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, weights: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    return state | {"model": get_model_state_dict(model)} if weights else state
