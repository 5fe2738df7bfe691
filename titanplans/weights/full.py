"""Full state dicts to split models and back, and those of their optimizers.

Gathered tensors are on the CPU of rank 0; tensors to load are there, or on every rank. Tensor by tensor: no rank has
more than its part, one whole tensor, and rank 0 the state.
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
from titanplans.weights.compare import differences, in_words
from titanplans.weights.gather import gather, stored, whole

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
Described = dict[str, tuple[torch.Size, torch.dtype]]


def gather_full_state_dict(
    model: nn.Module, *, only: Callable[[str], bool] = lambda name: True
) -> dict[str, torch.Tensor]:
    """Return the whole state dict on the CPU of rank 0, and {} on others. Collective.

    A tied parameter is one tensor under all its names, as in the state dict of the whole model.

    Args:
        model: split, sharded, replicated or whole.
        only: which names, for the adapters alone; the same on every rank.

    Raises:
        ModelError: something in the state dict is no tensor.
    """
    tied = stored(model)[1]
    names = {name: tied.get(name, name) for name in model.state_dict() if only(name)}
    gathered = gather(model, only=set(names.values()).__contains__)
    tensors = {name: tensor for name, tensor in gathered if rank() == 0}
    return {name: tensors[first] for name, first in names.items()} if rank() == 0 else {}


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, torch.Tensor] | None, *, strict: bool = True
) -> None:
    """Load whole tensors into a split model, in place; each rank keeps its part, in the model's dtype and device.

    Args:
        model: split, sharded, replicated or whole, with memory.
        state: on rank 0, from which each tensor is broadcast, and None elsewhere; or the same on every rank, and nothing
            is sent. A tied parameter may have any of its names.
        strict: whether every tensor of the model must be there. Tensors that the model lacks are refused in any case.

    Raises:
        ModelError: on every rank: names are missing or unexpected, shapes differ, or the model has no memory yet.
    """
    tensors, tied = stored(model)
    _fill(tensors, tied, state, strict=strict, what="the model")


def gather_full_optimizer_state_dict(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return the optimizer's whole state on the CPU of rank 0, and {} on others. Collective.

    It has the form of torch.distributed.checkpoint.state_dict, {"state": {parameter: {"exp_avg": tensor, ...}},
    "param_groups": [{"params": [parameters], "lr": ..., ...}]}. An optimizer that has taken no step gets its state first.
    """
    state = get_optimizer_state_dict(model, optimizers)
    gathered = tree_map_only(torch.Tensor, whole, state)
    return gathered if rank() == 0 else {}


def load_full_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any] | None
) -> None:
    """Load what `gather_full_optimizer_state_dict` returned, of a model that was split in any way or in none.

    A parameter without a state in `state` had no gradient yet, and has none afterwards.

    Args:
        model: whose parameters are optimized.
        optimizers: of the same kind, with the same groups of parameters; their hyperparameters become those of `state`.
        state: on rank 0, and None elsewhere; or the same on every rank.

    Raises:
        ModelError: on every rank: states or groups of parameters differ.
    """
    own: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizers))
    if (names := broadcast_object(None if state is None else [*state["state"]])) is not None:
        own["state"] = {name: values for name, values in own["state"].items() if name in names}
    groups = None if state is None else state["param_groups"]
    wrong = None
    if groups is not None and _names(groups) != _names(own["param_groups"]):
        wrong = "it has other groups of parameters: build it with those that the state was gathered with"
    tensors = None if state is None else _flat(state["state"])
    groups = _fill(
        _flat(own["state"]), {}, tensors, strict=True, what="the optimizer", wrong=wrong, small=groups
    )
    set_optimizer_state_dict(
        model,
        optimizers,
        {"state": own["state"], "param_groups": groups},
        options=StateDictOptions(strict=False),  # strict, each parameter needs a state
    )


def _fill(
    targets: dict[str, torch.Tensor],
    tied: Mapping[str, str],
    state: Mapping[str, torch.Tensor] | None,
    *,
    strict: bool,
    what: str,
    wrong: str | None = None,
    small: Any = None,
) -> Any:
    """Copy whole tensors into `targets`, once all ranks agree that they fit; return rank 0's `small`.

    `tied` are other names of targets, `state` and `strict` are as for `load_full_state_dict`. An error says that `what`
    can't be loaded, and why; `wrong` is a reason that the caller has found. `small` is any small object.
    """
    own = None if state is None else {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    described, small = broadcast_object((own, small))
    if described is None:
        wrong = "there is no state on rank 0: give it there, or on every rank"
    else:
        wrong = wrong or _fault(targets, tied, described if own is None else own, state, strict)
    ranks = gather_objects((state is None, wrong))
    if (fault := next((fault for _, fault in ranks if fault), None)) is not None:
        raise ModelError(f"{what} can't be loaded: {fault}")
    sends = any(lacks for lacks, _ in ranks)
    for first, name in _by_target(described, tied).items():
        target, (shape, dtype) = targets[first], described[name]
        full = state[name] if state is not None and (rank() == 0 or not sends) else None
        if sends:
            full = _broadcast(full, shape, dtype, target)
        assert full is not None
        copy_shard(target, full, name=name)
    return small


def _by_target(names: Iterable[str], tied: Mapping[str, str]) -> dict[str, str]:
    """Return the first of `names` for each target."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(tied.get(name, name), name)
    return found


def _fault(
    targets: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    described: Described,
    state: Mapping[str, torch.Tensor] | None,
    strict: bool,
) -> str | None:
    """Return what does not fit, in words; None if all does."""
    there = _by_target(described, tied)
    theirs = {first: described[name][0] for first, name in there.items()}
    ours = {name: tensor.shape for name, tensor in targets.items() if strict or name in there}
    values = state or {}
    others = {
        "tied here, and of different values": [
            f"{name} and {there[tied[name]]}"
            for name in values
            if name in tied and not torch.equal(values[name], values[there[tied[name]]])
        ],
        "without memory yet: call model.to_empty(device=...), then titanplans.modeling.initialize for buffers": [
            name for name, tensor in targets.items() if tensor.is_meta
        ],
    }
    return "; ".join(filter(None, (differences(theirs, ours), in_words(others)))) or None


def _flat(state: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state by "parameter: name of the state"."""
    flat = {f"{name}: {key}": value for name, values in state.items() for key, value in values.items()}
    for name, value in flat.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"{name} in the optimizer's state is a {type(value).__name__}, and only tensors are gathered and loaded"
            )
    return flat


def _names(groups: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    return [sorted(group["params"]) for group in groups]


def _broadcast(
    full: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, target: torch.Tensor
) -> torch.Tensor:
    """Return rank 0's `full`, on a device that the process group sends from: the target's own, if it does."""
    known = group_device_types()
    device = target.device if target.device.type in known else torch.device(known[0])
    if full is None:
        full = torch.empty(shape, dtype=dtype, device=device)
    full = full.detach().to(device).contiguous()
    if full.numel():
        dist.broadcast(full.view(-1).view(torch.uint8), src=0)  # bytes: no backend has every dtype
    return full
