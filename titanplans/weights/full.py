"""Gather full state dicts of split models and their optimizers on the CPU of rank 0, and load them.

Gathering and loading work tensor by tensor: in addition to its shards, a rank needs memory for one full tensor, and rank 0
also for the state dict.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from titanplans.errors import ModelError
from titanplans.split.objects import broadcast_object, gather_objects, rank
from titanplans.split.parameters.shards import copy_shard
from titanplans.torch_private.dispatch import tree_map_only
from titanplans.torch_private.distributed import group_device_types
from titanplans.weights.compare import describe_kinds, differences
from titanplans.weights.gather import gather, gather_full_tensor, state_tensors

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
Description = dict[str, tuple[torch.Size, torch.dtype]]


def gather_full_state_dict(
    model: nn.Module, *, only: Callable[[str], bool] = lambda name: True
) -> dict[str, torch.Tensor]:
    """Return the full state dict on the CPU of rank 0, and {} on the others. Collective.

    A tied parameter is one tensor under all its names, as in the state dict of the unsplit model.

    Args:
        model: a split or unsplit model.
        only: takes a name, and returns whether to gather its tensor, e.g. only adapters; has to be the same on every rank.

    Raises:
        ModelError: a value of the state dict is not a tensor.
    """
    tied = state_tensors(model)[1]
    names = {name: tied.get(name, name) for name in model.state_dict() if only(name)}
    gathered = gather(model, only=set(names.values()).__contains__)
    tensors = {name: tensor for name, tensor in gathered if rank() == 0}
    return {name: tensors[first] for name, first in names.items()} if rank() == 0 else {}


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, torch.Tensor] | None, *, strict: bool = True
) -> None:
    """Load full tensors into a split model in place; each rank keeps its shards, in the model's dtype and on its device.

    Args:
        model: a split or unsplit model, not on meta.
        state: the full state dict on rank 0, which broadcasts each tensor, and None on the others. Or the same state dict on
            every rank; then nothing is sent. A tied parameter may have any of its names.
        strict: whether every tensor of the model must be in `state`. Unexpected tensors are refused in any case.

    Raises:
        ModelError: names are missing or unexpected, shapes differ, or the model is on meta. It is raised on every rank.
    """
    tensors, tied = state_tensors(model)
    _load_tensors(tensors, tied, state, strict=strict, subject="the model")


def gather_full_optimizer_state_dict(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return the full state of optimizers on the CPU of rank 0, and {} on the others. Collective.

    The state has the format of torch.distributed.checkpoint.state_dict: {"state": {parameter: {"exp_avg": tensor, ...}},
    "param_groups": [{"params": [parameters], "lr": ..., ...}]}. If an optimizer has taken no step, its state is created.
    """
    state = get_optimizer_state_dict(model, optimizers)
    gathered = tree_map_only(torch.Tensor, gather_full_tensor, state)
    return gathered if rank() == 0 else {}


def load_full_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any] | None
) -> None:
    """Load a state that `gather_full_optimizer_state_dict` returned for the same model, split in any way.

    A parameter that had no gradient when the state was gathered has no entry in it, and no state after the load.

    Args:
        model: the model whose parameters are optimized.
        optimizers: optimizers of the same kind, with the same parameter groups; they get the hyperparameters of `state`.
        state: the state on rank 0, and None on the others; or the same state on every rank.

    Raises:
        ModelError: states or parameter groups differ. It is raised on every rank.
    """
    current: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizers))
    if (names := broadcast_object(None if state is None else [*state["state"]])) is not None:
        current["state"] = {name: values for name, values in current["state"].items() if name in names}
    groups = None if state is None else state["param_groups"]
    fault = None
    if groups is not None and _parameter_names(groups) != _parameter_names(current["param_groups"]):
        fault = "the state was gathered with other parameter groups: build the optimizer with the groups of the state"
    tensors = None if state is None else _flatten(state["state"])
    groups = _load_tensors(
        _flatten(current["state"]),
        {},
        tensors,
        strict=True,
        subject="the optimizer",
        fault=fault,
        extra=groups,
    )
    set_optimizer_state_dict(
        model,
        optimizers,
        {"state": current["state"], "param_groups": groups},
        options=StateDictOptions(strict=False),  # with strict=True, every parameter would need a state
    )


def _load_tensors(
    targets: dict[str, torch.Tensor],
    tied: Mapping[str, str],
    state: Mapping[str, torch.Tensor] | None,
    *,
    strict: bool,
    subject: str,
    fault: str | None = None,
    extra: Any = None,
) -> Any:
    """Copy full tensors into `targets` after all ranks agree that they fit. Collective.

    Args:
        targets: the tensors to write into, by name.
        tied: maps the other names of a tied tensor to its name in `targets`.
        state, strict: see `load_full_state_dict`.
        subject: the beginning of an error's message.
        fault: why the state can't be loaded, if the caller knows a reason on this rank.
        extra: a small object to broadcast.

    Returns:
        Rank 0's `extra`.

    Raises:
        ModelError: the state can't be loaded on some rank. It is raised on every rank.
    """
    local = None if state is None else {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    description, extra = broadcast_object((local, extra))
    if description is None:
        fault = "rank 0 has no state: pass it on rank 0, or on every rank"
    else:
        fault = fault or _find_fault(targets, tied, description if local is None else local, state, strict)
    ranks = gather_objects((state is None, fault))
    if (fault := next((fault for _, fault in ranks if fault), None)) is not None:
        raise ModelError(f"{subject} can't be loaded: {fault}")
    sends = any(lacks_state for lacks_state, _ in ranks)
    for target_name, name in _by_target(description, tied).items():
        target, (shape, dtype) = targets[target_name], description[name]
        full = state[name] if state is not None and (rank() == 0 or not sends) else None
        if sends:
            full = _broadcast(full, shape, dtype, target)
        assert full is not None
        copy_shard(target, full, name=name)
    return extra


def _by_target(names: Iterable[str], tied: Mapping[str, str]) -> dict[str, str]:
    """Map each target to the first of its names in `names`. `tied` maps the other names of a tied target to the target."""
    first_names: dict[str, str] = {}
    for name in names:
        first_names.setdefault(tied.get(name, name), name)
    return first_names


def _find_fault(
    targets: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    description: Description,
    state: Mapping[str, torch.Tensor] | None,
    strict: bool,
) -> str | None:
    """Return in words why a state does not fit the targets; None if it fits."""
    names = _by_target(description, tied)
    state_shapes = {target: description[name][0] for target, name in names.items()}
    target_shapes = {name: tensor.shape for name, tensor in targets.items() if strict or name in names}
    values = state or {}
    others = {
        "tied in the model, but with different values in the state": [
            f"{name} and {names[tied[name]]}"
            for name in values
            if name in tied and not torch.equal(values[name], values[names[tied[name]]])
        ],
        "without memory yet: call model.to_empty(device=...), then titanplans.modeling.initialize for buffers": [
            name for name, tensor in targets.items() if tensor.is_meta
        ],
    }
    faults = differences(state_shapes, target_shapes), describe_kinds(others)
    return "; ".join(filter(None, faults)) or None


def _flatten(state: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state by "parameter: name of the state"."""
    flat = {f"{name}: {key}": value for name, values in state.items() for key, value in values.items()}
    for name, value in flat.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"{name} in the optimizer's state is a {type(value).__name__}, but only tensors can be gathered and loaded"
            )
    return flat


def _parameter_names(groups: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    return [sorted(group["params"]) for group in groups]


def _broadcast(
    full: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, target: torch.Tensor
) -> torch.Tensor:
    """Broadcast rank 0's `full`, on the target's device or, if the process group does not support this device, on
    another."""
    device_types = group_device_types()
    device = target.device if target.device.type in device_types else torch.device(device_types[0])
    if full is None:
        full = torch.empty(shape, dtype=dtype, device=device)
    full = full.detach().to(device).contiguous()
    if full.numel():
        # As bytes, since no backend supports every dtype.
        dist.broadcast(full.view(-1).view(torch.uint8), src=0)
    return full
