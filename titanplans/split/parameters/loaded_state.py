"""Loading a state: full tensors become this rank's shards, and shards that another rank saved are refused."""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from titanplans.errors import ModelError
from titanplans.split.parameters.shards import as_shard_of, local_shard

_WEIGHTS = (
    "save the full tensors of titanplans.gather_full_state_dict, called on every rank, and load them with "
    "load_state_dict or titanplans.load_full_state_dict"
)
"""The remedy if a state has one rank's shards of a model's weights."""

_OPTIMIZER = (
    "save the state that titanplans.gather_full_optimizer_state_dict returns on every rank, and load it with "
    "titanplans.load_full_optimizer_state_dict"
)
"""The remedy if a state has one rank's shards of an optimizer's state."""
_CHECKED = "_state_of_this_rank"
"""The attribute of an optimizer that holds the state that was checked last."""


def load_as_shards(model: nn.Module) -> None:
    """Let `model.load_state_dict` take full tensors. Let both it and optimizer steps refuse shards of another rank."""
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_take_shards)
    _check_at_steps()


def _take_shards(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    """Replace full tensors in `state` by DTensors where `module` has DTensors: a pre-hook of `load_state_dict`.

    `state` has the same values on every rank, so nothing is communicated. A wrong shape is left for `load_state_dict` to
    refuse.

    Raises:
        ModelError: `state` has the shard of another rank.
    """
    assigns = metadata.get("assign_to_params_buffers", False)
    for name, parameter in module._parameters.items():
        full = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(full, torch.Tensor):
            continue
        if isinstance(full, DTensor):
            _refuse_shard_of_other_rank(full, parameter, prefix + name, _WEIGHTS)
            continue
        if full.shape != parameter.shape:
            continue
        shard = local_shard(full.detach(), parameter.device_mesh, parameter.placements, name=prefix + name)
        # With assign=True the loaded tensor stays, and a view would keep the full tensor in memory.
        state[prefix + name] = as_shard_of(parameter, shard.clone() if assigns else shard)


def _refuse_shard_of_other_rank(loaded: DTensor, expected: DTensor, name: str, remedy: str) -> None:
    """Refuse `loaded` if another rank saved it and its shard differs from the shard of `expected`, this rank's tensor.

    torch.load restores a DTensor with the mesh of the rank that saved it. That mesh equals this rank's except for the
    coordinate, so torch takes the shard for this rank's.

    Raises:
        ModelError: `loaded`, called `name`, is such a shard.
    """
    saved_mesh, mesh = loaded.device_mesh, expected.device_mesh
    if saved_mesh is mesh or saved_mesh != mesh:  # torch refuses a tensor on a mesh of other ranks
        return
    saved_coordinate, coordinate = saved_mesh.get_coordinate(), mesh.get_coordinate()
    assert saved_coordinate is not None
    assert coordinate is not None
    for placement, before, now in zip(loaded.placements, saved_coordinate, coordinate, strict=True):
        if before != now and not placement.is_replicate():
            rank = int(saved_mesh.mesh[tuple(saved_coordinate)])
            raise ModelError(
                f"{name} is the shard that rank {rank} saved, but this is another rank: {remedy}"
            )


@cache
def _check_at_steps() -> None:
    """Check the state of every optimizer of this process when it takes a step.

    The hook is global, because the training loop's optimizer is unknown here. Hugging Face's Trainer, for example, makes and
    loads its own.
    """
    register_optimizer_step_pre_hook(check_optimizer_state)


def check_optimizer_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse a state with shards that another rank saved; a pre-hook of an optimizer's step.

    Raises:
        ModelError: the state has such a shard.
    """
    if torch.compiler.is_compiling():  # `compile_optimizer` calls this before the compiled step
        return
    # This state has been checked before: a load_state_dict since then would have replaced the state object.
    if optimizer.__dict__.get(_CHECKED) is optimizer.state:
        return
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in state.items():
            if isinstance(value, DTensor):
                what = f"{name} of a parameter {tuple(parameter.shape)} in the optimizer's state"
                _refuse_shard_of_other_rank(value, parameter, what, _OPTIMIZER)
    optimizer.__dict__[_CHECKED] = optimizer.state
