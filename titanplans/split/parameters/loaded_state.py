"""One rank's shards, loaded on all ranks, are refused, for a model and for its optimizer."""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from titanplans.split.parameters.shards import refuse_shard_of_other_rank, take_shards

_INSTEAD = (
    "save the state that titanplans.gather_full_optimizer_state_dict returns on every rank, and load it by "
    "titanplans.load_full_optimizer_state_dict"
)
_CHECKED = "_state_of_this_rank"
"""The attribute of an optimizer that is its state as it was checked."""


def check_loaded_state(model: nn.Module) -> None:
    """Refuse shards of another rank when they are loaded into the parameters of `model` or into their optimizer."""
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            module.register_load_state_dict_pre_hook(take_shards)
    _check_at_steps()


@cache
def _check_at_steps() -> None:
    """Check the state of every optimizer of this process at its steps.

    A training loop's optimizer is known to nobody here: Hugging Face's Trainer makes and loads its own.
    """
    register_optimizer_step_pre_hook(check_optimizer_state)


def check_optimizer_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse a state with shards that another rank saved; a pre-hook of an optimizer's step.

    Raises:
        ModelError: there is one.
    """
    if torch.compiler.is_compiling():  # `compile_optimizer` asks before the compiled step
        return
    if optimizer.__dict__.get(_CHECKED) is optimizer.state:  # load_state_dict makes a new one
        return
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in state.items():
            if isinstance(value, DTensor):
                what = f"{name} of a parameter {tuple(parameter.shape)} in the optimizer's state"
                refuse_shard_of_other_rank(value, parameter, what, _INSTEAD)
    optimizer.__dict__[_CHECKED] = optimizer.state
