"""Adapters added to their base weights, tensor by tensor: a model without adapters, to be published."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanplans.adapters.low_rank import adapted
from titanplans.errors import ModelError
from titanplans.precision.nf4 import CODES, SCALES, dequantise, is_quantised
from titanplans.split.adapted import FACTORS, is_transposed
from titanplans.split.decoder import without_wrappers
from titanplans.weights.gather import of_stages, stored, whole, with_values
from titanplans.weights.lazy import LazyTensor, computed, lazily


def whole_tensors(
    models: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> dict[str, LazyTensor]:
    """Return the whole tensors of a model, split in any way, with its adapters added to the weights.

    Reading one is collective, and gives it on rank 0's CPU, elsewhere a tensor on meta.

    Args:
        models: the model, or the stages of it that this process has.
        group: the ranks of the pipeline, whose stages have no adapters; None: there is one model.

    Raises:
        ModelError: a weight with an adapter is tied to another; or something has no memory yet.
    """
    if group is not None:
        return of_stages(models, group)
    tensors = with_values(stored(models[0])[0])
    return merged(lazily(tensors, lambda name: whole(tensors[name])), named_adapted(models[0]))


def merged(tensors: Mapping[str, LazyTensor], adapters: Mapping[str, nn.Module]) -> dict[str, LazyTensor]:
    """Return tensors without the adapters of the modules `adapters`: W + scaling * lora_B lora_A where one was.

    Raises:
        ModelError: a part of an adapter, or its weight, is not among `tensors`.
    """
    left = dict(tensors)
    for owner, adapter in adapters.items():
        base = (CODES, SCALES) if is_quantised(adapter) else ("weight",)
        names = [f"{owner}.{name}" for name in (*base, *FACTORS)]
        if missing := [name for name in names if name not in left]:
            raise ModelError(
                f"{owner} has an adapter, and {missing[0]} is not there to be merged with it: a weight that is tied to "
                "another, or a checkpoint of adapters alone"
            )
        left[f"{owner}.weight"] = computed(partial(_sum, adapter), [left.pop(name) for name in names])
    return left


def _sum(adapter: Any, *parts: torch.Tensor) -> torch.Tensor:
    """The sum is made in float32, or the weight's float64, and has the weight's dtype; of one in NF4, that of lora_A."""
    *base, a, b = parts
    dtype = a.dtype if is_quantised(adapter) else base[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    weight = dequantise(base[0], base[1], wide) if is_quantised(adapter) else base[0].to(wide)
    update = b.to(wide) @ a.to(wide) * adapter._low_rank.scaling
    return (weight + (update.t() if is_transposed(adapter) else update)).to(dtype)


def named_adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` with an adapter, by the names that the state dict has."""
    return {without_wrappers(name): module for name, module in adapted(model).items()}
