"""Adapters added to their base weights, tensor by tensor: a model without adapters, to be published."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.adapters.low_rank import adapted
from titanplans.errors import ModelError
from titanplans.plan.adapted import FACTORS, is_transposed
from titanplans.plan.decoder import without_wrappers
from titanplans.precision.nf4 import BLOCK, CODES, SCALES, dequantise, is_quantised
from titanplans.weights.gather import stored, whole, with_values

Read = Callable[[str], torch.Tensor]
"""Returns the whole tensor of a name, or on a rank that does not write one on meta; collective, if the model is split."""


class Merge(NamedTuple):
    """How an adapter is added to its weight."""

    scaling: float
    transposed: bool
    quantised: bool


def handed_on(model: nn.Module) -> tuple[dict[str, torch.Tensor], Read]:
    """Return the tensors of `model`, split in any way, with its adapters added to the weights, and what reads them whole.

    Raises:
        ModelError: a weight with an adapter is tied to another; or something has no memory yet.
    """
    tensors = with_values(stored(model)[0])
    return merged(tensors, lambda name: whole(tensors[name]), merges(model))


def merges(model: nn.Module) -> dict[str, Merge]:
    """Return the adapters of `model`, which may be split, by the names that their modules have in the state dict."""
    found: dict[str, Any] = named_adapted(model)
    return {
        name: Merge(module._low_rank.scaling, is_transposed(module), is_quantised(module))
        for name, module in found.items()
    }


def merged(
    tensors: Mapping[str, torch.Tensor], read: Read, adapters: Mapping[str, Merge]
) -> tuple[dict[str, torch.Tensor], Read]:
    """Return tensors without adapters, and what reads them: W + scaling * lora_B lora_A where one was.

    The sum is made in float32 (in float64 where the weight is), and rounded to the dtype of the weight, or of the adapter
    where the weight is in NF4.

    Args:
        tensors: name -> shape and dtype; may lie on meta.
        read: returns the values of each.
        adapters: of the model, as `merges` returns them.

    Raises:
        ModelError: a part of an adapter, or its weight, is not among `tensors`.
    """
    left, taken = {}, set()
    for owner, adapter in adapters.items():
        parts = _parts(owner, adapter)
        if missing := [name for name in parts if name not in tensors]:
            raise ModelError(
                f"{owner} has an adapter, and {missing[0]} is not there to be merged with it: a weight that is tied to "
                "another, or a checkpoint of adapters alone"
            )
        taken |= set(parts)
        left[f"{owner}.weight"] = _described(tensors, owner, adapter)

    def read_merged(name: str) -> torch.Tensor:
        owner = name.rpartition(".")[0]
        if name not in left:
            return read(name)
        adapter, like = adapters[owner], left[name]
        *base, a, b = (read(part) for part in _parts(owner, adapter))
        wide = torch.promote_types(like.dtype, torch.float32)
        weight = dequantise(base[0], base[1], wide) if adapter.quantised else base[0].to(wide)
        update = b.to(wide) @ a.to(wide) * adapter.scaling
        return (weight + (update.t() if adapter.transposed else update)).to(like.dtype)

    others = {name: tensor for name, tensor in tensors.items() if name not in taken}
    return {**others, **left}, read_merged


def _parts(owner: str, adapter: Merge) -> list[str]:
    base = (CODES, SCALES) if adapter.quantised else ("weight",)
    return [f"{owner}.{name}" for name in (*base, *FACTORS)]


def _described(tensors: Mapping[str, torch.Tensor], owner: str, adapter: Merge) -> torch.Tensor:
    """Return the merged weight on meta."""
    if not adapter.quantised:
        return tensors[f"{owner}.weight"].to("meta")
    outputs, blocks = tensors[f"{owner}.{SCALES}"].shape
    return torch.empty(outputs, blocks * BLOCK, dtype=tensors[f"{owner}.lora_A"].dtype, device="meta")


def named_adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` with an adapter, by the names that the state dict has."""
    return {without_wrappers(name): module for name, module in adapted(model).items()}
